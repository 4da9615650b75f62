// project: q, k and v, the products of x with three weights, as three matmuls would make them.
//
// Grid: (tiles of ROWS rows; tiles of OUTPUTS outputs of q, then of k, then of v); THREADS threads. Called by
// metal_ops/matmul.py once an attention layer. As matmul; one launch, because k and v alone have too few output tiles
// to keep a GPU busy. Moves each weight once for each tile of rows.

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void project(
    device T* q,
    device T* k,
    device T* v,
    device const T* x,
    WEIGHT_BUFFERS(q_weight),
    WEIGHT_BUFFERS(k_weight),
    WEIGHT_BUFFERS(v_weight),
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup MEMORY memory[MEMORY_SIZE];
  const int first_row = group.x * ROWS, num_rows = min(ROWS, NUM_ROWS - first_row), tile = group.y;
  const bool is_q = tile < Q_TILES, is_k = !is_q && tile < Q_TILES + KV_TILES;
  const int first_output = (is_q ? tile : is_k ? tile - Q_TILES : tile - Q_TILES - KV_TILES) * OUTPUTS;
  const int num_outputs = is_q ? Q_OUTPUTS : KV_OUTPUTS;
  device T* out = is_q ? q : is_k ? k : v;
  Work work;
  find_rows(work, x, first_row, thread_index);
  WeightRow weights[OUTPUT_TILES];
  UNROLL for (int o = 0; o < OUTPUT_TILES; o++) {
    const int output = stored_output(first_output + tile_output(o, thread_index), num_outputs);
    if (is_q) {
      weights[o] = WEIGHT_ROW(q_weight, output);
    } else if (is_k) {
      weights[o] = WEIGHT_ROW(k_weight, output);
    } else {
      weights[o] = WEIGHT_ROW(v_weight, output);
    }
  }
  Totals totals;
  sum_tile(totals, memory, weights, work, num_rows, 0, thread_index);
  UNROLL for (int n = 0; n < NUM_TOTALS; n++) {
    const Place place = place_of(n, thread_index);
    const int output = first_output + place.output;
    if (place.row >= num_rows || output >= num_outputs) continue;
    out[size_t(first_row + place.row) * num_outputs + output] = T(total_of(totals, n, 0, thread_index));
  }
}
