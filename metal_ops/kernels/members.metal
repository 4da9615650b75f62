// The members of an expert: the pairs (row, choice) that chose it, in the layout of `Lists` in metal_ops/route.py.
// Pairs share a row of x by PAIRS_PER_ROW. A threadgroup has those from `first` on to before `end`.
struct Members {
  device const int* pairs;
  int expert, count, first, end;
};

// A threadgroup's members. With HAS_ONE_TILE they are a tile: the one of that number among those of all experts that
// have members, the first one's first. A SIMD-group finds it, and loads before it is known whose it is: one wait for
// all. Without, where experts have few members, they are all of that expert among those that have some. None if there
// are not as many.
inline Members find_members(device const int* lists, int number, uint lane) {
  Members members;
#if HAS_ONE_TILE
  const int num_used = lists[0];
  int expert[SLOTS], first_pair[SLOTS], count[SLOTS];
  UNROLL for (int i = 0; i < SLOTS; i++) {
    const int used = min(32 * i + int(lane), NUM_EXPERTS - 1);
    expert[i] = lists[EXPERTS_OFFSET + used];
    first_pair[i] = lists[FIRSTS_OFFSET + used];
    count[i] = lists[COUNTS_OFFSET + used];
  }
  int num_before = 0, owner = -1, own_expert = 0, own_pair = 0, own_count = 0, own_first = 0;
  UNROLL for (int i = 0; i < SLOTS; i++) {
    const int num_tiles = 32 * i + int(lane) < num_used ? (count[i] + ROWS - 1) / ROWS : 0;
    const int from = num_before + simd_prefix_exclusive_sum(num_tiles);
    if (from <= number && number < from + num_tiles) {
      owner = lane;
      own_expert = expert[i];
      own_pair = first_pair[i];
      own_count = count[i];
      own_first = (number - from) * ROWS;
    }
    num_before = simd_shuffle(from + num_tiles, 31);
  }
  owner = simd_max(owner);
  const ushort owner_lane = owner < 0 ? 0 : owner;
  members.expert = simd_shuffle(own_expert, owner_lane);
  members.count = simd_shuffle(own_count, owner_lane);
  members.pairs = lists + PAIRS_OFFSET + simd_shuffle(own_pair, owner_lane);
  members.first = simd_shuffle(own_first, owner_lane);
  members.end = owner < 0 ? 0 : min(members.first + ROWS, members.count);
#else
  members.expert = lists[EXPERTS_OFFSET + number];
  members.count = lists[COUNTS_OFFSET + number];
  members.pairs = lists + PAIRS_OFFSET + lists[FIRSTS_OFFSET + number];
  members.first = 0;
  members.end = number < lists[0] ? members.count : 0;
#endif
  return members;
}

// The rows that a thread has to do with of a tile of members. Those beyond the last take it again, and are not stored.
inline void find_member_rows(
    thread Work& work, device const T* x, thread const Members& members, int first, uint thread_index) {
  UNROLL for (int n = 0; n < NUM_POINTERS; n++) {
    const int member = min(first + pointed_row(n, thread_index), members.count - 1);
    work.at[n] = x + size_t(members.pairs[member] / PAIRS_PER_ROW) * DEPTH + pointed_at(n, thread_index);
  }
}
