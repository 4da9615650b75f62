// group_rows: the pairs (row, choice) grouped by expert, in the layout of `Lists` in metal_ops/group_rows.py.
//
//   lists = how many experts have pairs; those experts; the first place and the number of each one's pairs; the pairs
//
// in order of expert, then of pair. What lies beyond the experts that have pairs, and the spare place, is not written.
//
// Grid: one threadgroup; THREADS threads. Called once a mixture by metal_ops/group_rows.py. One threadgroup, because
// where an expert's pairs begin depends on all the others. A SIMD-group has every SIMDGROUPS-th expert and walks the
// pairs twice, 32 at a time, for all of its experts at once: it counts, and after a barrier places each pair by how
// many of its kind came before, which a ballot tells. A round of 128 pairs is 4 steps of each walk, a wait for the
// cache each. Moves the pairs in and out once; 2 * OWN counts a thread, 4 * NUM_EXPERTS bytes of threadgroup memory.
#define SIMDGROUPS (THREADS / 32)
// Experts of a SIMD-group: OWN of them, or one less.
#define OWN ((NUM_EXPERTS + SIMDGROUPS - 1) / SIMDGROUPS)
#define NO_EXPERT -1

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void group_rows(
    device int* lists,
    device const int* chosen,
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup int counts[NUM_EXPERTS];
  int count[OWN], place[OWN];
  for (int i = 0; i < OWN; i++) count[i] = 0;
  for (int pair = lane; pair < NUM_PAIRS; pair += 32) {
    const int expert = chosen[pair];
    for (int i = 0; i < OWN; i++) count[i] += int(expert == SIMDGROUPS * i + int(simdgroup));
  }
  for (int i = 0; i < OWN; i++) {
    const int expert = SIMDGROUPS * i + simdgroup;
    count[i] = simd_sum(count[i]);
    if (lane == 0 && expert < NUM_EXPERTS) counts[expert] = count[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = 0; i < OWN; i++) {
    const int expert = SIMDGROUPS * i + simdgroup;
    int num_listed = 0, num_used = 0;
    for (int before = lane; before < min(expert, NUM_EXPERTS); before += 32) {
      num_listed += counts[before];
      num_used += int(counts[before] > 0);
    }
    const int first = simd_sum(num_listed), used = simd_sum(num_used);
    place[i] = PAIRS_OFFSET + first;
    if (lane == 0 && count[i] > 0) {
      lists[EXPERTS_OFFSET + used] = expert;
      lists[FIRSTS_OFFSET + used] = first;
      lists[COUNTS_OFFSET + used] = count[i];
    }
    if (lane == 0 && expert == NUM_EXPERTS - 1) lists[0] = used + int(count[i] > 0);
  }
  for (int at = 0; at < NUM_PAIRS; at += 32) {
    const int pair = at + int(lane);
    const int expert = pair < NUM_PAIRS ? chosen[pair] : NO_EXPERT;
    for (int i = 0; i < OWN; i++) {
      const bool is_mine = expert == SIMDGROUPS * i + int(simdgroup);
      const uint mine = uint(simd_vote::vote_t(simd_ballot(is_mine)));
      if (is_mine) lists[place[i] + int(popcount(mine & ((1u << lane) - 1)))] = pair;
      place[i] += int(popcount(mine));
    }
  }
}
