// route_choose: the experts that each row's logits choose, and their weights: the first half of route, where rows are
// enough for several threadgroups. route_choice.metal says how they are chosen; route_group does the other half.
//
// Grid: (tiles of SIMDGROUPS * OWN_ROWS rows); THREADS threads. Called by metal_ops/route.py. Reads the logits once
// from memory. 2 bytes of threadgroup memory for a choice, which the SIMD-group alone reads again: no barrier of all.

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void route_choose(
    device float* weights,
    device int* chosen,
    device const float* logits,
    BIAS_BUFFER
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup ushort own[SIMDGROUPS * OWN_ROWS * ACTIVE];
  const int first = int(group) * (SIMDGROUPS * OWN_ROWS);
  // Among the threadgroup's rows.
  const int first_row = int(simdgroup) * OWN_ROWS;
  const int end_row = min(first_row + OWN_ROWS, NUM_ROWS - first);
  float bias[SLOTS];
  load_bias(bias, BIAS lane);
  device const float* own_logits = logits + first * NUM_EXPERTS;
  choose_rows(&own[0], own_logits, bias, first_row, end_row, lane);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  weigh_rows(weights + first * ACTIVE, &own[0], own_logits, first_row, end_row, lane);
  for (int i = first_row * ACTIVE + int(lane); i < end_row * ACTIVE; i += 32) chosen[first * ACTIVE + i] = own[i];
}
