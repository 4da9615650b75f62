// project: q, k and v, the products of x with three weights, as three matmuls would make them.
//
// Grid: (tiles of ROWS rows; tiles of OUTPUTS outputs of q, then of k, then of v); CHUNKS SIMD-groups, a chunk of K
// each. Called by metal_ops/matmul.py once an attention layer. As matmul; one launch, because k and v alone have too
// few output tiles to keep a GPU busy. Moves each weight once for each tile of rows.

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void project(
    device T* q,
    device T* k,
    device T* v,
    device const T* x,
    WEIGHT_BUFFERS(q_weight),
    WEIGHT_BUFFERS(k_weight),
    WEIGHT_BUFFERS(v_weight),
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint chunk [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[CHUNKS][ROWS * OUTPUTS];
  const int first_row = group.x * ROWS, tile = group.y;
  const bool is_q = tile < Q_TILES, is_k = !is_q && tile < Q_TILES + KV_TILES;
  const int first_output = (is_q ? tile : is_k ? tile - Q_TILES : tile - Q_TILES - KV_TILES) * OUTPUTS;
  const int num_outputs = is_q ? Q_OUTPUTS : KV_OUTPUTS;
  device T* out = is_q ? q : is_k ? k : v;
  LaneRows rows[ROW_TILES];
  find_rows(rows, x, first_row, lane);
  WeightRow weights[OUTPUT_TILES];
  for (int o = 0; o < OUTPUT_TILES; o++) {
    const int output = min(first_output + TILE * o + lane_output(lane), num_outputs - 1);
    if (is_q) {
      weights[o] = WEIGHT_ROW(q_weight, output);
    } else if (is_k) {
      weights[o] = WEIGHT_ROW(k_weight, output);
    } else {
      weights[o] = WEIGHT_ROW(v_weight, output);
    }
  }
  sum_chunk(partial[chunk], weights, rows, chunk, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int element = thread_index; element < ROWS * OUTPUTS; element += THREADS) {
    const int row = first_row + element / OUTPUTS, output = first_output + element % OUTPUTS;
    if (row >= NUM_ROWS || output >= num_outputs) continue;
    out[size_t(row) * num_outputs + output] = T(fold(partial, element));
  }
}
