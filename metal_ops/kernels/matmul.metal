// matmul: out[t, n] = round(sum_k x[t, k] * weight[n, k] + bias[n])
//
// Grid: (tiles of ROWS rows, tiles of TURNS * OUTPUTS outputs); THREADS threads. Called by metal_ops/matmul.py for
// every product that shares no launch: the router's and the head's too. Rows come first in the grid: the threadgroups
// that read one tile of weights run together, and the rows stay in the cache. A lane loads up to 16 bytes of weights at
// once. 16 KB of threadgroup memory at most for few rows, 32 for many (48 on NVIDIA's GPUs). Moves the weight once for
// each tile of up to 32 rows (64).

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void matmul(
    device OUT* out,
    device const T* x,
    WEIGHT_BUFFERS(weight),
#if HAS_BIAS
    device const B* bias,
#endif
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup MEMORY memory[MEMORY_SIZE];
  const int first_output = group.y * (TURNS * OUTPUTS), first_row = group.x * ROWS;
  const int num_rows = min(ROWS, NUM_ROWS - first_row);
  Work work;
  find_rows(work, x, first_row, thread_index);
  WeightRow weights[OUTPUT_TILES];
  UNROLL for (int o = 0; o < OUTPUT_TILES; o++) {
    weights[o] = WEIGHT_ROW(weight, stored_output(first_output + tile_output(o, thread_index), NUM_OUTPUTS));
  }
  Totals totals;
  for (int turn = 0; turn < TURNS; turn++) {
    sum_tile(totals, memory, weights, work, num_rows, turn, thread_index);
    UNROLL for (int n = 0; n < NUM_TOTALS; n++) {
      const Place place = place_of(n, thread_index);
      const int output = first_output + turn * OUTPUTS + place.output;
      if (place.row >= num_rows || output >= NUM_OUTPUTS) continue;
      float sum = total_of(totals, n, 0, thread_index);
#if HAS_BIAS
      sum += float(bias[output]);
#endif
      out[size_t(first_row + place.row) * NUM_OUTPUTS + output] = OUT(sum);
    }
  }
}
