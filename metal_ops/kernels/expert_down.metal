// expert_down: outputs[p] = w2[e] hidden[p] of every pair p = t * A + a, where e is the expert that row t chose as its
// a-th; in fp32, for the next norm to sum by the weights.
//
// Grid: (tiles of OUTPUTS outputs, experts that may have members); CHUNKS SIMD-groups, a chunk of K each. Called by
// metal_ops/experts.py. As matmul, to whose sums these are equal to the bit, of the members of one expert, walked as
// expert_gate_up does and for its reasons. At most 16 KB of threadgroup memory. Moves the weights of the experts that
// have members, once.

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void expert_down(
    device float* outputs,
    device const T* hidden,
    device const int* lists,
    WEIGHT_BUFFERS(w2),
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint chunk [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[CHUNKS][ROWS * OUTPUTS];
  if (int(group.y) >= lists[0]) return;
  const Members members = load_members(lists, group.y);
  const int first_output = group.x * OUTPUTS;
  WeightRow weights[OUTPUT_TILES];
  for (int o = 0; o < OUTPUT_TILES; o++) {
    const int output = min(first_output + TILE * o + lane_output(lane), NUM_OUTPUTS - 1);
    weights[o] = WEIGHT_ROW(w2, members.expert * NUM_OUTPUTS + output);
  }
  for (int first = 0; first < members.count; first += ROWS) {
    LaneRows rows[ROW_TILES];
    find_members(rows, hidden, members, first, lane);
    sum_chunk(partial[chunk], weights, rows, chunk, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int element = thread_index; element < ROWS * OUTPUTS; element += THREADS) {
      const int member = first + element / OUTPUTS, output = first_output + element % OUTPUTS;
      if (member >= members.count || output >= NUM_OUTPUTS) continue;
      outputs[size_t(members.pairs[member]) * NUM_OUTPUTS + output] = fold(partial, element);
    }
    // The next tile's sums go where these were.
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
