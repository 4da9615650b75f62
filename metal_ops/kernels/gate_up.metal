// gate_up: out[t, n] = round(silu(round(w1[n] . x[t])) * round(w3[n] . x[t])), the first half of a feed-forward.
//
// Grid: (tiles of ROWS rows, tiles of OUTPUTS / 2 outputs); CHUNKS SIMD-groups, a chunk of K each. Called by
// metal_ops/matmul.py. As matmul, with both weights of an output in one threadgroup, the first half of its tiles w1's and
// the second w3's: rows are loaded once for both, and neither product is written to memory. 16 KB of threadgroup memory
// at most: two threadgroups of 256 threads a core or more. Moves both weights once for each tile of rows.

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void gate_up(
    device T* out,
    device const T* x,
    WEIGHT_BUFFERS(w1),
    WEIGHT_BUFFERS(w3),
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint chunk [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[CHUNKS][ROWS * OUTPUTS];
  const int first_output = group.y * HALF_OUTPUTS, first_row = group.x * ROWS;
  LaneRows rows[ROW_TILES];
  find_rows(rows, x, first_row, lane);
  WeightRow weights[OUTPUT_TILES];
  UNROLL for (int o = 0; o < HALF_TILES; o++) {
    const int output = min(first_output + TILE * o + lane_output(lane), NUM_OUTPUTS - 1);
    weights[o] = WEIGHT_ROW(w1, output);
    weights[HALF_TILES + o] = WEIGHT_ROW(w3, output);
  }
  sum_chunk(partial[chunk], weights, rows, chunk, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int element = thread_index; element < ROWS * HALF_OUTPUTS; element += THREADS) {
    const int row = element / HALF_OUTPUTS, output = element % HALF_OUTPUTS;
    if (first_row + row >= NUM_ROWS || first_output + output >= NUM_OUTPUTS) continue;
    out[size_t(first_row + row) * NUM_OUTPUTS + first_output + output] = fold_swiglu(partial, row, output);
  }
}
