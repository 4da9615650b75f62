// gate_up: out[t, n] = round(silu(round(w1[n] . x[t])) * round(w3[n] . x[t])), the first half of a feed-forward.
//
// Grid: (tiles of ROWS rows, tiles of TURNS * OUTPUTS outputs); THREADS threads. Called by metal_ops/matmul.py. As
// matmul, with both weights of an output in one threadgroup, the first half of its tiles w1's and the second w3's: rows
// are loaded once for both, and neither product is written to memory. Moves both weights once for each tile of rows.

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void gate_up(
    device T* out,
    device const T* x,
    WEIGHT_BUFFERS(w1),
    WEIGHT_BUFFERS(w3),
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup MEMORY memory[MEMORY_SIZE];
  const int first_output = group.y * (TURNS * OUTPUTS), first_row = group.x * ROWS;
  const int num_rows = min(ROWS, NUM_ROWS - first_row);
  Work work;
  find_rows(work, x, first_row, thread_index);
  WeightRow weights[OUTPUT_TILES];
  UNROLL for (int o = 0; o < WEIGHT_TILES; o++) {
    const int output = stored_output(first_output + tile_output(o, thread_index), NUM_OUTPUTS);
    weights[o] = WEIGHT_ROW(w1, output);
    weights[WEIGHT_TILES + o] = WEIGHT_ROW(w3, output);
  }
  Totals totals;
  for (int turn = 0; turn < TURNS; turn++) {
    sum_tile(totals, memory, weights, work, num_rows, turn, thread_index);
    UNROLL for (int n = 0; n < NUM_TOTALS; n++) {
      const Place place = place_of(n, thread_index);
      const int output = first_output + turn * OUTPUTS + place.output;
      if (place.row >= num_rows || output >= NUM_OUTPUTS) continue;
      const float gate = total_of(totals, n, 0, thread_index), up = total_of(totals, n, 1, thread_index);
      out[size_t(first_row + place.row) * NUM_OUTPUTS + output] = swiglu(gate, up);
    }
  }
}
