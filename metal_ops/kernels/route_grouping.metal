// The pairs (row, choice) grouped by expert, in the layout of `Lists` in metal_ops/route.py: what route and
// route_group share.
//
//   lists = how many experts have pairs; those experts, the most pairs first, the lowest id of equals; the first place
//           and the number of each one's pairs; the pairs, in order of expert id, then of pair
//
// What lies beyond the experts that have pairs, and the spare place, is not written. A lane has the SLOTS
// experts lane, lane + 32, ... A SIMD-group places the pairs that it has counted.

inline uint lanes_where(bool is_so) { return uint(simd_vote::vote_t(simd_ballot(is_so))); }

// Of 32 pairs: those of the same expert as the lane's, and those of each of the lane's experts. What is beyond the last
// pair has expert 0, and comes after all of them: nothing of its own comes after it.
struct Alike {
  uint own[SLOTS], same;
};
inline Alike alike_of(int expert, uint lane) {
  Alike alike;
  alike.same = ~0u;
  for (int i = 0; i < SLOTS; i++) alike.own[i] = ~0u;
  // All bits of the ids agree.
  for (int bit = 0; (NUM_EXPERTS - 1) >> bit; bit++) {
    const uint ones = lanes_where((expert >> bit) & 1);
    alike.same &= (expert >> bit) & 1 ? ones : ~ones;
    for (int i = 0; i < SLOTS; i++) alike.own[i] &= ((32 * i + int(lane)) >> bit) & 1 ? ones : ~ones;
  }
  return alike;
}

// How many pairs each of the lane's experts has.
template <typename Chosen>
inline void count_pairs(thread int (&count)[SLOTS], Chosen chosen, int first_pair, int end_pair, uint lane) {
  for (int i = 0; i < SLOTS; i++) count[i] = 0;
  for (int from = first_pair; from < end_pair; from += 32) {
    const int num_pairs = min(32, end_pair - from);
    const Alike alike = alike_of(int(lane) < num_pairs ? chosen[from + int(lane)] : 0, lane);
    const uint pair_lanes = num_pairs < 32 ? (1u << num_pairs) - 1 : ~0u;
    for (int i = 0; i < SLOTS; i++) {
      // Of lanes beyond the last expert the bits that ids have are those of another one.
      if (32 * i + int(lane) < NUM_EXPERTS) count[i] += int(popcount(alike.own[i] & pair_lanes));
    }
  }
}

// The places of the lane's experts in the list, of those that have pairs; how many there are. As many steps as there
// are different numbers of pairs: few where there are few rows.
inline int rank_experts(thread int (&rank)[SLOTS], thread const int (&totals)[SLOTS], uint lane) {
  const uint before_lane = (1u << lane) - 1;
  int num_ranked = 0, below = 0x7FFFFFFF;
  while (true) {
    int most = 0;
    for (int i = 0; i < SLOTS; i++) most = max(most, totals[i] < below ? totals[i] : 0);
    most = simd_max(most);
    if (most == 0) return num_ranked;
    for (int i = 0; i < SLOTS; i++) {
      const uint equal = lanes_where(totals[i] == most);
      if (totals[i] == most) rank[i] = num_ranked + int(popcount(equal & before_lane));
      num_ranked += int(popcount(equal));
    }
    below = most;
  }
}

// Lists the experts, from what every SIMD-group has counted. place: of the lane's experts, where the SIMD-group's first
// pair goes.
inline void list_experts(
    thread int (&place)[SLOTS],
    device int* lists,
    threadgroup const ushort* counts,
    uint lane,
    uint simdgroup) {
  int totals[SLOTS], firsts[SLOTS], num_listed = 0;
  for (int i = 0; i < SLOTS; i++) {
    const int expert = 32 * i + int(lane);
    int before = 0;
    totals[i] = 0;
    for (int s = 0; s < SIMDGROUPS; s++) {
      const int of_s = counts[s * 32 * SLOTS + expert];
      totals[i] += of_s;
      if (s < int(simdgroup)) before += of_s;
    }
    firsts[i] = num_listed + simd_prefix_exclusive_sum(totals[i]);
    place[i] = PAIRS_OFFSET + firsts[i] + before;
    num_listed = simd_shuffle(firsts[i] + totals[i], 31);
  }
  if (simdgroup > 0) return;
  int rank[SLOTS];
  const int num_used = rank_experts(rank, totals, lane);
  if (lane == 0) lists[0] = num_used;
  for (int i = 0; i < SLOTS; i++) {
    if (totals[i] == 0) continue;
    lists[EXPERTS_OFFSET + rank[i]] = 32 * i + int(lane);
    lists[FIRSTS_OFFSET + rank[i]] = firsts[i];
    lists[COUNTS_OFFSET + rank[i]] = totals[i];
  }
}

template <typename Chosen>
inline void place_pairs(
    device int* lists, Chosen chosen, thread int (&place)[SLOTS], int first_pair, int end_pair, uint lane) {
  const uint before_lane = (1u << lane) - 1;
  for (int from = first_pair; from < end_pair; from += 32) {
    const int pair = from + int(lane);
    const bool is_pair = pair < end_pair;
    const int expert = is_pair ? chosen[pair] : 0;
    const Alike alike = alike_of(expert, lane);
    int to = 0;
    for (int i = 0; i < SLOTS; i++) {
      const int of_slot = simd_shuffle(place[i], ushort(expert % 32));
      if (expert / 32 == i) to = of_slot;
      place[i] += int(popcount(alike.own[i]));
    }
    if (is_pair) lists[to + int(popcount(alike.same & before_lane))] = pair;
  }
}

// Groups the pairs that a SIMD-group counts: every SIMD-group of one threadgroup takes part.
template <typename Chosen>
inline void group_pairs(
    device int* lists,
    threadgroup ushort* counts,
    Chosen chosen,
    int first_pair,
    int end_pair,
    uint lane,
    uint simdgroup) {
  int count[SLOTS], place[SLOTS];
  count_pairs(count, chosen, first_pair, end_pair, lane);
  for (int i = 0; i < SLOTS; i++) counts[(int(simdgroup) * SLOTS + i) * 32 + int(lane)] = ushort(count[i]);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  list_experts(place, lists, counts, lane, simdgroup);
  place_pairs(lists, chosen, place, first_pair, end_pair, lane);
}
