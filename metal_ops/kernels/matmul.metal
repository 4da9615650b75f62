// matmul: out[t, n] = round(sum_k x[t, k] * weight[n, k] + bias[n])
//
// Grid: (tiles of ROWS rows, tiles of OUTPUTS outputs); CHUNKS SIMD-groups, a chunk of K each. Called by
// metal_ops/matmul.py for every projection and for the head. Split over K, because a round of one row has few output
// tiles and needs many loads in flight. Rows come first in the grid: the threadgroups that read one tile of weights run
// together, and the rows stay in the cache. A lane loads 16 bytes of bf16 weights, 8 of 8 bits, 4 of 4: what a block of K
// has for it. 16 KB of threadgroup memory at most: two threadgroups of 256 threads a core or more. Moves the weight
// once for each tile of up to 32 rows.

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void matmul(
    device OUT* out,
    device const T* x,
    WEIGHT_BUFFERS(weight),
#if HAS_BIAS
    device const B* bias,
#endif
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint chunk [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[CHUNKS][ROWS * OUTPUTS];
  const int first_output = group.y * OUTPUTS, first_row = group.x * ROWS;
  LaneRows rows[ROW_TILES];
  find_rows(rows, x, first_row, lane);
  WeightRow weights[OUTPUT_TILES];
  for (int o = 0; o < OUTPUT_TILES; o++) {
    weights[o] = WEIGHT_ROW(weight, min(first_output + TILE * o + lane_output(lane), NUM_OUTPUTS - 1));
  }
  sum_chunk(partial[chunk], weights, rows, chunk, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int element = thread_index; element < ROWS * OUTPUTS; element += THREADS) {
    const int row = first_row + element / OUTPUTS, output = first_output + element % OUTPUTS;
    if (row >= NUM_ROWS || output >= NUM_OUTPUTS) continue;
    float sum = fold(partial, element);
#if HAS_BIAS
    sum += float(bias[output]);
#endif
    out[size_t(row) * NUM_OUTPUTS + output] = OUT(sum);
  }
}
