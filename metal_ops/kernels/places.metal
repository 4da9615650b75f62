// Where the lanes of a SIMD-group stand in the matrices of attention, and their product: sums = left x right.
//
// Of the left matrices, keys (key, d) and values (d, key), a lane holds row lane_output in the columns lane_row and
// lane_row + 1. Of all others, queries (d, pair), scores (key, pair), weights (key, pair) and sums (d, pair), its
// element i is that of row place_row in column place_column. So scores are weights where they stand.
//
// A lane has PLACE_COLUMNS columns; element i is of the lane's column i % PLACE_COLUMNS. Lanes that have the same
// columns differ in PLACE_BITS bits.
#define PLACE_COLUMNS 2
#define PLACE_BITS 3
typedef simdgroup_matrix<T, 8, 8> Operand;

inline int place_row(uint lane, int i) { return lane_output(lane); }
inline int place_column(uint lane, int i) { return lane_row(lane) + i; }
inline ushort place_bit(int i) { return column_bit(i); }

// NVIDIA's GPUs ask for what comes next, for which they have no registers.
inline void load_to_cache(device const T* from) {}

// Consecutive numbers.
template <int N>
inline void load_run(thread T (&run)[N], device const T* from) {
  constexpr int wide = N % 4 == 0 ? 4 : 2;
  UNROLL for (int i = 0; i < N; i += wide) {
    const vec<T, wide> loaded = *(device const vec<T, wide>*)(from + i);
    UNROLL for (int j = 0; j < wide; j++) run[i + j] = loaded[j];
  }
}

template <typename V, int N>
inline void store_run(device V* to, thread const V (&run)[N]) {
  constexpr int wide = N % 4 == 0 ? 4 : 2;
  UNROLL for (int i = 0; i < N; i += wide) {
    vec<V, wide> stored;
    UNROLL for (int j = 0; j < wide; j++) stored[j] = run[i + j];
    *(device vec<V, wide>*)(to + i) = stored;
  }
}

// Adds two products to the sums of each tile of pairs.
inline void multiply_two(
    thread Sums (&sums)[PAIR_TILES],
    thread Operand (&left)[2],
    thread Operand (&right)[PAIR_TILES],
    thread Operand (&second_right)[PAIR_TILES]) {
  UNROLL for (int p = 0; p < PAIR_TILES; p++) {
    simdgroup_multiply_accumulate(sums[p], left[0], right[p], sums[p]);
    simdgroup_multiply_accumulate(sums[p], left[1], second_right[p], sums[p]);
  }
}
