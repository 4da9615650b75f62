// places.metal for NVIDIA GPUs, whose tensor cores take the right operand, and give the sums, with a column's elements
// side by side in a lane where the left one has a row's: all but the left matrices are held transposed. They multiply
// 16 pairs at a time, and two products as one.
#define PLACE_COLUMNS 1
#define PLACE_BITS 2
typedef simdgroup_matrix<T, 8, 8> Operand;

inline int place_row(uint lane, int i) { return lane_row(lane) + i; }
inline int place_column(uint lane, int i) { return lane_output(lane); }
inline ushort place_bit(int i) { return 1 << i; }

// Part of a run: as many bytes as the run is a multiple of, up to 16.
template <typename V, int N>
struct Part {
  static constexpr int bytes = N * sizeof(V) % 16 == 0 ? 16 : N * sizeof(V) % 8 == 0 ? 8 : 4;
  static constexpr int size = bytes / sizeof(V);
  alignas(bytes) V values[size];
};
template <int N>
inline void load_run(T (&run)[N], const T* from) {
  typedef Part<T, N> Own;
  UNROLL for (int i = 0; i < N; i += Own::size) {
    const Own part = *(const Own*)(from + i);
    UNROLL for (int j = 0; j < Own::size; j++) run[i + j] = part.values[j];
  }
}
template <typename V, int N>
inline void store_run(V* to, const V (&run)[N]) {
  typedef Part<V, N> Own;
  UNROLL for (int i = 0; i < N; i += Own::size) {
    Own part;
    UNROLL for (int j = 0; j < Own::size; j++) part.values[j] = run[i + j];
    *(Own*)(to + i) = part;
  }
}

#if IS_FLOAT
inline void multiply_one(Sums& sums, const Operand& left, const Operand& right) {
  const uint lane = this_lane();
  for (int k = 0; k < 8; k++) {
    const float held = simd_shuffle(right.elements[k % 2], lane / 4 * 4 + k / 2);
    for (int i = 0; i < 2; i++) {
      const float other = simd_shuffle(left.elements[k % 2], 4 * (lane_row(lane) + i) + k / 2);
      sums.elements[i] = fma(held, other, sums.elements[i]);
    }
  }
}
#else
typedef vec<T, 2> Pair;
inline uint word_of(const Operand& operand) { return as_type<uint>(Pair{operand.elements[0], operand.elements[1]}); }
#endif

inline void multiply_two(
    Sums (&sums)[PAIR_TILES], Operand (&left)[2], Operand (&right)[PAIR_TILES], Operand (&second_right)[PAIR_TILES]) {
#if IS_FLOAT
  for (int p = 0; p < PAIR_TILES; p++) {
    multiply_one(sums[p], left[0], right[p]);
    multiply_one(sums[p], left[1], second_right[p]);
  }
#else
  const uint both_left[2] = {word_of(left[0]), word_of(left[1])};
  UNROLL for (int p = 0; p < PAIR_TILES; p += 2) {
    const uint upper[2] = {word_of(right[p]), word_of(second_right[p])};
    if (p + 1 < PAIR_TILES) {
      const uint lower[2] = {word_of(right[p + 1]), word_of(second_right[p + 1])};
      multiply_by_16(T(), sums[p].elements, sums[p + 1].elements, upper, lower, both_left);
    } else {
      const uint lower[2] = {0, 0};
      float2 unused = float2(0.0f);
      multiply_by_16(T(), sums[p].elements, unused, upper, lower, both_left);
    }
  }
#endif
}
