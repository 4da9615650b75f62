// The rows that a thread has to do with of a tile that starts at first_row. Those beyond the last take it again, and
// are not stored.
inline void find_rows(thread Work& work, device const T* x, int first_row, uint thread_index) {
  UNROLL for (int n = 0; n < NUM_POINTERS; n++) {
    const int row = min(first_row + pointed_row(n, thread_index), NUM_ROWS - 1);
    work.at[n] = x + size_t(row) * DEPTH + pointed_at(n, thread_index);
  }
}
