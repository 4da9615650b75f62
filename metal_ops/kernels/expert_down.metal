// expert_down: outputs[p] = w2[e] hidden[p] of every pair p = t * A + a, where e is the expert that row t chose as its
// a-th; in fp32, for the next norm to sum by the weights.
//
// Grid: (tiles of TURNS * OUTPUTS outputs, tiles of members that there may be); THREADS threads. Called by
// metal_ops/experts.py. As matmul, to whose sums these are equal to the bit, of members of one expert, taken as
// expert_gate_up does and for its reasons. The lists may be read before the wait: not the last launch, expert_gate_up,
// but one before it made them. Moves the weights of the experts that have members, once.

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void expert_down(
    device float* outputs,
    device const T* hidden,
    device const int* lists,
    WEIGHT_BUFFERS(w2),
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup MEMORY memory[MEMORY_SIZE];
  const Members members = find_members(lists, group.y, thread_index % 32);
  const int first_output = group.x * (TURNS * OUTPUTS);
  for (int first = members.first; first < members.end; first += ROWS) {
    const int num_rows = min(ROWS, members.end - first);
    Work work;
    find_member_rows(work, hidden, members, first, thread_index);
    WeightRow weights[OUTPUT_TILES];
    UNROLL for (int o = 0; o < WEIGHT_TILES; o++) {
      const int output = stored_output(first_output + tile_output(o, thread_index), NUM_OUTPUTS);
      weights[o] = WEIGHT_ROW(w2, members.expert * NUM_OUTPUTS + output);
    }
    Totals totals;
    for (int turn = 0; turn < TURNS; turn++) {
      sum_tile(totals, memory, weights, work, num_rows, turn, thread_index);
      UNROLL for (int n = 0; n < NUM_TOTALS; n++) {
        const Place place = place_of(n, thread_index);
        const int output = first_output + turn * OUTPUTS + place.output;
        if (place.row >= num_rows || output >= NUM_OUTPUTS) continue;
        outputs[size_t(members.pairs[first + place.row]) * NUM_OUTPUTS + output] = total_of(totals, n, 0, thread_index);
      }
    }
#if !HAS_ONE_TILE
    // The next tile's rows and sums go where these were.
    threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
  }
}
