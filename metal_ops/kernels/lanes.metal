// Where the lanes of a SIMD-group stand in a simdgroup matrix of 8 rows and 8 columns.
//
// A lane holds 2 elements: those of row lane_output in the columns lane_row and lane_row + 1. (The layout that MLX and
// tinygrad rely on too.) In a product of weights with rows, a row of the matrix is an output and a column a row of x.
#define TILE 8

typedef simdgroup_matrix<float, 8, 8> Sums;

inline int lane_output(uint lane) { return int((lane / 4 & 4) + lane / 2 % 4); }
inline int lane_quarter(uint lane) { return int((lane / 4 & 2) + lane % 2); }
inline int lane_row(uint lane) { return 2 * lane_quarter(lane); }
// Lanes that hold the same two columns differ in three bits.
inline ushort column_bit(int i) { return i == 2 ? 16 : 2 << i; }
