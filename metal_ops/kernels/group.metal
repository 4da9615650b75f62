// group: the pairs (row, choice) grouped by expert: the other half of route, after choose. grouping.metal says how.
//
// Grid: one threadgroup; THREADS threads. Called by metal_ops/route.py. A SIMD-group counts the experts of OWN_PAIRS
// pairs, and after the barrier, when it knows how many come before, places them. Reads the choices once from memory.
// One barrier; 2 bytes of threadgroup memory for a count of a SIMD-group, 2 KB for 64 experts.

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void group(
    device int* lists,
    device const int* chosen,
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup ushort counts[SIMDGROUPS][32 * SLOTS];
  const int first_pair = int(simdgroup) * OWN_PAIRS;
  const int end_pair = min(first_pair + OWN_PAIRS, NUM_PAIRS);
  int count[SLOTS], place[SLOTS];
  for (int i = 0; i < SLOTS; i++) count[i] = 0;
  for (int from = first_pair; from < end_pair; from += 32) {
    const int num_pairs = min(32, end_pair - from);
    const Alike alike = alike_of(int(lane) < num_pairs ? chosen[from + int(lane)] : 0, lane);
    const uint pairs = num_pairs < 32 ? (1u << num_pairs) - 1 : ~0u;
    for (int i = 0; i < SLOTS; i++) {
      // Of lanes beyond the last expert the bits that ids have are those of another one.
      if (32 * i + int(lane) < NUM_EXPERTS) count[i] += int(popcount(alike.own[i] & pairs));
    }
  }
  for (int i = 0; i < SLOTS; i++) counts[simdgroup][32 * i + int(lane)] = ushort(count[i]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  list_experts(place, lists, counts, lane, simdgroup);
  place_pairs(lists, chosen, place, first_pair, end_pair, lane);
}
