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

// The rows that a thread has to do with of a tile of members. Those beyond the last take it again, and are not stored.
inline void find_members(
    thread Work& work, device const T* x, thread const Members& members, int first, uint thread_index) {
  UNROLL for (int n = 0; n < NUM_POINTERS; n++) {
    const int member = min(first + pointed_row(n, thread_index), members.count - 1);
    work.at[n] = x + size_t(members.pairs[member] / PAIRS_PER_ROW) * DEPTH + pointed_at(n, thread_index);
  }
}
