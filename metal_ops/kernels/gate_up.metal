// gate_up: out[t, n] = round(silu(round(w1[n] . x[t])) * round(w3[n] . x[t])), the first half of a feed-forward.
//
// Grid: (tiles of ROWS rows, tiles of OUTPUTS outputs); CHUNKS SIMD-groups, a chunk of K each. Called by
// metal_ops/matmul.py. As matmul, with both weights of an output in one threadgroup, so that neither half is written
// to memory. Twice 8 KB of threadgroup memory at most. Moves both weights once for each tile of rows.

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void gate_up(
    device T* out,
    device const T* x,
    WEIGHT_BUFFERS(w1),
    WEIGHT_BUFFERS(w3),
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint chunk [[simdgroup_index_in_threadgroup]]) {
  threadgroup float gates[CHUNKS][ROWS * OUTPUTS], ups[CHUNKS][ROWS * OUTPUTS];
  const int first_output = group.y * OUTPUTS, first_row = group.x * ROWS;
  LaneRows rows[ROW_TILES];
  find_rows(rows, x, first_row, lane);
  WeightRow gate[OUTPUT_TILES], up[OUTPUT_TILES];
  for (int o = 0; o < OUTPUT_TILES; o++) {
    const int output = min(first_output + TILE * o + lane_output(lane), NUM_OUTPUTS - 1);
    gate[o] = WEIGHT_ROW(w1, output);
    up[o] = WEIGHT_ROW(w3, output);
  }
  sum_chunk(gates[chunk], gate, rows, chunk, lane);
  sum_chunk(ups[chunk], up, rows, chunk, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int element = thread_index; element < ROWS * OUTPUTS; element += THREADS) {
    const int row = first_row + element / OUTPUTS, output = first_output + element % OUTPUTS;
    if (row >= NUM_ROWS || output >= NUM_OUTPUTS) continue;
    out[size_t(row) * NUM_OUTPUTS + output] = swiglu(fold(gates, element), fold(ups, element));
  }
}
