// route_group: the pairs (row, choice) grouped by expert: the other half of route, after route_choose.
// route_grouping.metal says how.
//
// Grid: one threadgroup; THREADS threads. Called by metal_ops/route.py. A SIMD-group counts the experts of OWN_PAIRS
// pairs, and after the barrier, when it knows how many come before, places them. Reads the choices once from memory.
// One barrier; 2 bytes of threadgroup memory for a count of a SIMD-group, 2 KB for 64 experts.

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void route_group(
    device int* lists,
    device const int* chosen,
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup ushort counts[SIMDGROUPS * 32 * SLOTS];
  const int first_pair = int(simdgroup) * OWN_PAIRS;
  const int end_pair = min(first_pair + OWN_PAIRS, NUM_PAIRS);
  group_pairs(lists, &counts[0], chosen, first_pair, end_pair, lane, simdgroup);
}
