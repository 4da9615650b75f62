// expert_gate_up: hidden[p] = round(silu(round(w1[e] x[t])) * round(w3[e] x[t])) of every pair p = t * A + a, where
// e is the expert that row t chose as its a-th.
//
// Grid: (tiles of OUTPUTS / 2 outputs, experts that may have members); CHUNKS SIMD-groups, a chunk of K each. Called by
// metal_ops/experts.py. As gate_up, to whose sums these are equal to the bit, of the members of one expert: they pass
// by in tiles of ROWS, about as many as an expert has on average, because rows that fill a tile up cost as much as
// true ones. One threadgroup walks all tiles of its expert, and the grid has no third dimension for them: outputs
// and experts are threadgroups enough for any GPU, the weights of a walk come out of memory once and then out of the
// cache, and no threadgroups are launched for members that are not there, of which a worst case would have most.
// 16 KB of threadgroup memory at most, two threadgroups of 256 threads a core or more. Moves the weights of the experts that have members, once.

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void expert_gate_up(
    device T* hidden,
    device const T* x,
    device const int* lists,
    WEIGHT_BUFFERS(w1),
    WEIGHT_BUFFERS(w3),
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint chunk [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[CHUNKS][ROWS * OUTPUTS];
  if (int(group.y) >= lists[0]) return;
  const Members members = load_members(lists, group.y);
  const int first_output = group.x * HALF_OUTPUTS;
  WeightRow weights[OUTPUT_TILES];
  UNROLL for (int o = 0; o < HALF_TILES; o++) {
    const int output = min(first_output + TILE * o + lane_output(lane), NUM_OUTPUTS - 1);
    weights[o] = WEIGHT_ROW(w1, members.expert * NUM_OUTPUTS + output);
    weights[HALF_TILES + o] = WEIGHT_ROW(w3, members.expert * NUM_OUTPUTS + output);
  }
  for (int first = 0; first < members.count; first += ROWS) {
    LaneRows rows[ROW_TILES];
    find_members(rows, x, members, first, lane);
    sum_chunk(partial[chunk], weights, rows, chunk, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int element = thread_index; element < ROWS * HALF_OUTPUTS; element += THREADS) {
      const int row = element / HALF_OUTPUTS, output = element % HALF_OUTPUTS;
      if (first + row >= members.count || first_output + output >= NUM_OUTPUTS) continue;
      const size_t pair = members.pairs[first + row];
      hidden[pair * NUM_OUTPUTS + first_output + output] = fold_swiglu(partial, row, output);
    }
    // The next tile's sums go where these were.
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
