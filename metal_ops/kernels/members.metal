// The members of an expert: the pairs (row, choice) that chose it, in the layout of `Lists` in metal_ops/route.py.
// Pairs share a row of x by PAIRS_PER_ROW.
struct Members {
  device const int* pairs;
  int expert, count;
};

// The members of a threadgroup, of all that its expert has: those from `first` on to before `end`.
struct MembersTile {
  Members members;
  int first, end;
};

// The tile of that number among those of all experts that have members, the first one's first; without members if there
// are not as many. A SIMD-group finds it: loaded before it is known whose it is, which is one wait for all.
// Unless IS_TILED, where experts have few members, that number is an expert's and all its tiles are one threadgroup's.
inline MembersTile find_tile(device const int* lists, int number, uint lane) {
  MembersTile tile;
#if IS_TILED
  const int num_used = lists[0];
  int expert[SLOTS], first_pair[SLOTS], count[SLOTS];
  UNROLL for (int i = 0; i < SLOTS; i++) {
    const int used = min(32 * i + int(lane), NUM_EXPERTS - 1);
    expert[i] = lists[EXPERTS_OFFSET + used];
    first_pair[i] = lists[FIRSTS_OFFSET + used];
    count[i] = lists[COUNTS_OFFSET + used];
  }
  int num_before = 0, owner = -1, found_expert = 0, found_pair = 0, found_count = 0, found_first = 0;
  UNROLL for (int i = 0; i < SLOTS; i++) {
    const int num_tiles = 32 * i + int(lane) < num_used ? (count[i] + ROWS - 1) / ROWS : 0;
    const int from = num_before + simd_prefix_exclusive_sum(num_tiles);
    if (from <= number && number < from + num_tiles) {
      owner = lane;
      found_expert = expert[i];
      found_pair = first_pair[i];
      found_count = count[i];
      found_first = (number - from) * ROWS;
    }
    num_before = simd_shuffle(from + num_tiles, 31);
  }
  owner = simd_max(owner);
  const ushort from = owner < 0 ? 0 : owner;
  tile.members.expert = simd_shuffle(found_expert, from);
  tile.members.count = simd_shuffle(found_count, from);
  tile.members.pairs = lists + PAIRS_OFFSET + simd_shuffle(found_pair, from);
  tile.first = simd_shuffle(found_first, from);
  tile.end = owner < 0 ? 0 : min(tile.first + ROWS, tile.members.count);
#else
  tile.members.expert = lists[EXPERTS_OFFSET + number];
  tile.members.count = lists[COUNTS_OFFSET + number];
  tile.members.pairs = lists + PAIRS_OFFSET + lists[FIRSTS_OFFSET + number];
  tile.first = 0;
  tile.end = number < lists[0] ? tile.members.count : 0;
#endif
  return tile;
}

// The rows that a thread has to do with of a tile of members. Those beyond the last take it again, and are not stored.
inline void find_members(
    thread Work& work, device const T* x, thread const Members& members, int first, uint thread_index) {
  UNROLL for (int n = 0; n < NUM_POINTERS; n++) {
    const int member = min(first + pointed_row(n, thread_index), members.count - 1);
    work.at[n] = x + size_t(members.pairs[member] / PAIRS_PER_ROW) * DEPTH + pointed_at(n, thread_index);
  }
}
