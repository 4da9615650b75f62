// The table of a round, as metal_ops/table.py lays it out: ROWS_OFFSET and DRAWN_OFFSET are its capacity's.

struct Segment {
  int slot, start, first_row, num_rows, base;
};

inline int num_segments(device const int* table) { return table[0]; }

inline Segment load_segment(device const int* table, int index) {
  device const int* columns = table + 1 + 5 * index;
  Segment segment;
  segment.slot = columns[0];
  segment.start = columns[1];
  segment.first_row = columns[2];
  segment.num_rows = columns[3];
  segment.base = columns[4];
  return segment;
}

inline int row_position(device const int* table, int t) { return table[ROWS_OFFSET + 2 * t]; }
inline int row_base(device const int* table, int t) { return table[ROWS_OFFSET + 2 * t + 1]; }
inline int drawn_row(device const int* table, int n) { return table[DRAWN_OFFSET + n]; }
