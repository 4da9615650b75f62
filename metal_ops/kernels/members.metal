// The members of an expert: the pairs (row, choice) that chose it, in the layout of `Lists` in metal_ops/route.py.
// Pairs share a row of x by PAIRS_PER_ROW.
struct Members {
  device const int* pairs;
  int expert, count;
};

// Of the experts that have members, the one of that index.
inline Members load_members(device const int* lists, int used) {
  Members members;
  members.expert = lists[EXPERTS_OFFSET + used];
  members.count = lists[COUNTS_OFFSET + used];
  members.pairs = lists + PAIRS_OFFSET + lists[FIRSTS_OFFSET + used];
  return members;
}

inline device const T* member_row(device const T* x, thread const Members& members, int member) {
  return x + size_t(members.pairs[min(member, members.count - 1)] / PAIRS_PER_ROW) * DEPTH;
}

// The lane's rows of a tile of members. Those beyond the last take it again, and are not stored.
inline void find_members(
    thread LaneRows (&rows)[ROW_TILES], device const T* x, thread const Members& members, int first, uint lane) {
  for (int r = 0; r < ROW_TILES; r++) {
    const int member = first + TILE * r + loaded_row(lane);
    for (int i = 0; i < LANE_ROWS; i++) rows[r].at[i] = member_row(x, members, member + i);
  }
}
