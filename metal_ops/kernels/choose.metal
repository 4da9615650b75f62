// choose: the experts that each row's logits choose, and their weights: the first half of route, where rows are enough
// for several threadgroups. choice.metal says how they are chosen; group does the other half.
//
// Grid: (tiles of SIMDGROUPS * OWN_ROWS rows); THREADS threads. Called by metal_ops/route.py. Reads the logits once
// from memory. One barrier; 2 bytes of threadgroup memory for a choice.

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void choose(
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
  int count[SLOTS];
  for (int i = 0; i < SLOTS; i++) {
    bias[i] = BIAS_OF(min(32 * i + int(lane), NUM_EXPERTS - 1));
    count[i] = 0;
  }
  device const float* own_logits = logits + first * NUM_EXPERTS;
  choose_rows(&own[0], count, own_logits, bias, first_row, end_row, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  weigh_rows(weights + first * ACTIVE, &own[0], own_logits, first_row, end_row, lane);
  for (int i = first_row * ACTIVE + int(lane); i < end_row * ACTIVE; i += 32) chosen[first * ACTIVE + i] = own[i];
}
