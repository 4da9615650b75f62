// expert_gate_up: hidden[p] = round(silu(round(w1[e] x[t])) * round(w3[e] x[t])) of every pair p = t * A + a, where
// e is the expert that row t chose as its a-th.
//
// Grid: (tiles of TURNS * OUTPUTS outputs, tiles of members that there may be); THREADS threads. Called by
// metal_ops/experts.py. As gate_up, to whose sums these are equal to the bit, of members of one expert: they are taken
// in tiles of ROWS, about as many as an expert has on average, because rows that fill a tile up cost as much as true
// ones. Each tile is a threadgroup's, found in the lists: one that walked all of its expert's would be the last for
// long where a few experts have most members. Tiles of an expert come after each other in the grid, so its weights come
// out of memory once and then out of the cache. Without HAS_ONE_TILE, where hardly an expert has a second tile, the
// grid has experts instead, and a threadgroup walks all its expert's tiles.
// Moves the weights of the experts that have members, once.

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void expert_gate_up(
    device T* hidden,
    device const T* x,
    device const int* lists,
    WEIGHT_BUFFERS(w1),
    WEIGHT_BUFFERS(w3),
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup MEMORY memory[MEMORY_SIZE];
  // The last launch has made the lists.
  wait_for_last_launch();
  const Members members = find_members(lists, group.y, thread_index % 32);
  const int first_output = group.x * (TURNS * OUTPUTS);
  for (int first = members.first; first < members.end; first += ROWS) {
    const int num_rows = min(ROWS, members.end - first);
    Work work;
    find_member_rows(work, x, members, first, thread_index);
    WeightRow weights[OUTPUT_TILES];
    UNROLL for (int o = 0; o < WEIGHT_TILES; o++) {
      const int output = stored_output(first_output + tile_output(o, thread_index), NUM_OUTPUTS);
      weights[o] = WEIGHT_ROW(w1, members.expert * NUM_OUTPUTS + output);
      weights[WEIGHT_TILES + o] = WEIGHT_ROW(w3, members.expert * NUM_OUTPUTS + output);
    }
    Totals totals;
    for (int turn = 0; turn < TURNS; turn++) {
      sum_tile(totals, memory, weights, work, num_rows, turn, thread_index);
      UNROLL for (int n = 0; n < NUM_TOTALS; n++) {
        const Place place = place_of(n, thread_index);
        const int output = first_output + turn * OUTPUTS + place.output;
        if (place.row >= num_rows || output >= NUM_OUTPUTS) continue;
        const float gate = total_of(totals, n, 0, thread_index), up = total_of(totals, n, 1, thread_index);
        hidden[size_t(members.pairs[first + place.row]) * NUM_OUTPUTS + output] = swiglu(gate, up);
      }
    }
#if !HAS_ONE_TILE
    // The next tile's rows and sums go where these were.
    threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
  }
}
