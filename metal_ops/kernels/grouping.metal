// The pairs (row, choice) grouped by expert, in the layout of `Lists` in metal_ops/route.py: what route and group
// share.
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

// How many experts have more pairs than one, or as many and a lower id.
inline int rank_of(thread const int (&totals)[SLOTS], int slot, uint lane) {
  // Other for every expert.
  int keys[SLOTS], rank = 0;
  for (int i = 0; i < SLOTS; i++) keys[i] = totals[i] * (32 * SLOTS) - (32 * i + int(lane));
  for (int i = 0; i < SLOTS; i++) {
    for (ushort other = 0; other < 32; other++) rank += int(simd_shuffle(keys[i], other) > keys[slot]);
  }
  return rank;
}

// Lists the experts, from what every SIMD-group has counted. place: of the lane's experts, where the SIMD-group's first
// pair goes.
inline void list_experts(
    thread int (&place)[SLOTS],
    device int* lists,
    threadgroup const ushort (&counts)[SIMDGROUPS][32 * SLOTS],
    uint lane,
    uint simdgroup) {
  int totals[SLOTS], firsts[SLOTS], num_listed = 0, num_used = 0;
  for (int i = 0; i < SLOTS; i++) {
    const int expert = 32 * i + int(lane);
    int before = 0;
    totals[i] = 0;
    for (int s = 0; s < SIMDGROUPS; s++) {
      const int of_s = counts[s][expert];
      totals[i] += of_s;
      if (s < int(simdgroup)) before += of_s;
    }
    firsts[i] = num_listed + simd_prefix_exclusive_sum(totals[i]);
    place[i] = PAIRS_OFFSET + firsts[i] + before;
    num_listed = simd_shuffle(firsts[i] + totals[i], 31);
    num_used += int(popcount(lanes_where(totals[i] > 0)));
  }
  if (simdgroup > 0) return;
  if (lane == 0) lists[0] = num_used;
  for (int i = 0; i < SLOTS; i++) {
    const int at = rank_of(totals, i, lane);
    if (totals[i] == 0) continue;
    lists[EXPERTS_OFFSET + at] = 32 * i + int(lane);
    lists[FIRSTS_OFFSET + at] = firsts[i];
    lists[COUNTS_OFFSET + at] = totals[i];
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
