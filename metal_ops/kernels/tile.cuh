// tile.metal for NVIDIA GPUs: 16 outputs by 8 rows by 16 of K at a time, as tensor cores multiply.
//
// Blocks of K and their quarters are tile.metal's. A lane brings all 8 values of its quarter for both operands, of
// output lane_output of two tiles and of row loaded_row: the tensor cores take both with K along the lanes. Step j
// multiplies, in the lane's quarter, values 2j and 2j + 1, or j and j + 4 where weights have 4 bits. With fp32 the
// lanes pass their values around.
#define BLOCK 32
#define TILES_AT_ONCE 2
#define LANE_ROWS 1

struct LaneRows {
#if !IS_STAGED
  const
#endif
  T* at[LANE_ROWS];
};
// Two values. In a word where they fit one, because the compiler keeps halves of words apart, and joins them for every
// use.
#if IS_HALF || IS_BFLOAT
typedef uint Step;
#else
typedef vec<T, 2> Step;
#endif
struct RowsBlock {
  Step steps[4];
};
struct WeightsBlock {
  Step steps[4];
};

inline int loaded_row(uint lane) { return lane_output(lane); }

// The lower or the upper values of two steps.
#if IS_HALF || IS_BFLOAT
inline uint lower(uint a, uint b) { return chosen_bytes(a, b, 0x5410); }
inline uint upper(uint a, uint b) { return chosen_bytes(a, b, 0x7632); }
#else
inline Step joined(T a, T b) {
  Step step;
  step[0] = a;
  step[1] = b;
  return step;
}
inline Step lower(Step a, Step b) { return joined(a[0], b[0]); }
inline Step upper(Step a, Step b) { return joined(a[1], b[1]); }
#endif

// Loads that stay before the next barrier, of all threads or that of hold_loads: else every use waits for memory.
// Several tiles of few rows have no registers for that. Of many rows a lane's next units lie in the 256 bytes that
// memory is asked for, and then come from the second cache.
template <typename V>
inline V load_early(const V* from) {
#if IS_STAGED
  return load_with_next(from);
#elif ROW_TILES == 1
  return load_in_place(from);
#else
  return *from;
#endif
}
#if IS_STAGED || ROW_TILES == 1
#if BITS
// In words, as steps are.
struct Four {
  uint words[sizeof(S)];
};
inline Four load_four(const S* from) {
  Four four;
  for (int i = 0; i < sizeof(S); i += 2) {
    const uint2 loaded = load_early((const uint2*)from + i / 2);
    four.words[i] = loaded.x;
    four.words[i + 1] = loaded.y;
  }
  return four;
}
inline float value_in(const uint* words, int i, float) { return as_type<float>(words[i]); }
template <typename V>
inline V value_in(const uint* words, int i, V) { return as_type<V>(ushort(words[i / 2] >> (i % 2 * 16))); }
inline S value_of(const Four& four, int i) { return value_in(four.words, i, S()); }
#endif
// A barrier of the lanes of one SIMD-group, of up to 15.
inline bool hold_loads(int simdgroup) { return hold_lanes(simdgroup + 1); }
#else
inline bool hold_loads(int simdgroup) { return true; }
#endif

inline void load_rows(thread RowsBlock& block, thread const LaneRows& x, int k, int distance, uint lane) {
  const T* from = x.at[0] + k + lane_quarter(lane) * distance;
#if IS_HALF || IS_BFLOAT
  const uint4 words = IS_STAGED ? *(const uint4*)from : load_early((const uint4*)from);
  for (int j = 0; j < 4; j++) block.steps[j] = words[j];
#else
  for (int j = 0; j < 4; j++) block.steps[j] = ((const Step*)from)[j];
#endif
}

// Where weights have 4 bits, two values that lie 4 apart are cheap to get; so the rows' are taken so too.
inline void deal_rows(thread RowsBlock& block) {
#if BITS == 4
  const RowsBlock pairs = block;
  for (int i = 0; i < 2; i++) {
    block.steps[2 * i] = lower(pairs.steps[i], pairs.steps[i + 2]);
    block.steps[2 * i + 1] = upper(pairs.steps[i], pairs.steps[i + 2]);
  }
#endif
}

// Puts dealt rows where they were loaded from.
inline void store_dealt(thread const RowsBlock& block, thread LaneRows& x, int k, int distance, uint lane) {
#if BITS == 4
  Step* to = (Step*)(x.at[0] + k + lane_quarter(lane) * distance);
#if IS_HALF || IS_BFLOAT
  uint4 words;
  for (int j = 0; j < 4; j++) words[j] = block.steps[j];
  *(uint4*)to = words;
#else
  for (int j = 0; j < 4; j++) to[j] = block.steps[j];
#endif
#endif
}

// The bits of a word that are in the mask, and others. The compiler does not find the one instruction.
inline uint masked_or(uint word, uint mask, uint others) { return looked_up<0xea>(word, mask, others); }

inline void set_apart(thread WeightsBlock& block, thread const vec<T, 2> (&pairs)[4]) {
  for (int j = 0; j < 4; j++) block.steps[j] = as_type<Step>(pairs[j]);
}
inline void set_side_by_side(thread WeightsBlock& block, thread const vec<T, 2> (&pairs)[4]) {
  for (int j = 0; j < 4; j++) block.steps[j] = as_type<Step>(pairs[j]);
}

// Products that need none of each other come after each other: a sum takes several times as long as a product.
#if IS_HALF || IS_BFLOAT
template <int TILES, int N>
inline void multiply(thread Sums (*sums)[N], int first, thread WeightsBlock* weights, thread RowsBlock* rows) {
  UNROLL for (int j = 0; j < 4; j += 2) {
    UNROLL for (int r = 0; r < TILES; r++) {
      multiply_by_16(
          T(),
          sums[r][first].elements,
          sums[r][first + 1].elements,
          weights[0].steps + j,
          weights[1].steps + j,
          rows[r].steps + j);
    }
  }
}
#else
template <int TILES, int N>
inline void multiply(thread Sums (*sums)[N], int first, thread WeightsBlock* weights, thread RowsBlock* rows) {
  const uint lane = this_lane();
  for (int r = 0; r < TILES; r++) {
    for (int j = 0; j < 4; j++) {
      // Not unrolled: else the compiler takes many seconds a kernel.
      _Pragma("unroll 1") for (int quarter = 0; quarter < 4; quarter++) {
        for (int h = 0; h < 2; h++) {
          float x[2];
          for (int i = 0; i < 2; i++) x[i] = simd_shuffle(rows[r].steps[j][h], 4 * (lane_row(lane) + i) + quarter);
          for (int t = 0; t < TILES_AT_ONCE; t++) {
            const float weight = simd_shuffle(weights[t].steps[j][h], 4 * lane_output(lane) + quarter);
            for (int i = 0; i < 2; i++) {
              sums[r][first + t].elements[i] = fma(weight, x[i], sums[r][first + t].elements[i]);
            }
          }
        }
      }
    }
  }
}
#endif

// What a block of rows adds up to is a product with ones: the tensor cores have time for it, and leave the sums where
// they are wanted.
#if IS_HALF || IS_BFLOAT
struct Ones {
  uint upper[2], lower[2];
};
// Passed between lanes so that the compiler does not know them, and keeps them in registers: else it sets them anew for
// every product. NOTE: of a number that is converted as it runs it finds that all lanes have the same.
inline uint make_one() { return simd_shuffle(IS_HALF ? 0x3c003c00u : 0x3f803f80u, 0); }
inline Ones make_ones() { return Ones{{make_one(), make_one()}, {make_one(), make_one()}}; }
inline void add_rows(thread float2& total, thread RowsBlock& block, thread const Ones& ones) {
  float2 unused = float2(0.0f);
  for (int j = 0; j < 4; j += 2) multiply_by_16(T(), total, unused, ones.upper, ones.lower, block.steps + j);
}
#else
struct Ones {};
inline Ones make_ones() { return Ones{}; }
inline void add_rows(thread float2& total, thread RowsBlock& block, thread const Ones& ones) {
  const uint lane = this_lane();
  float sum = 0;
  for (int j = 0; j < 4; j++) sum += block.steps[j][0];
  for (int j = 0; j < 4; j++) sum += block.steps[j][1];
  for (int i = 0; i < 2; i++) sum += simd_shuffle_xor(sum, 1 << i);
  total += float2(simd_shuffle(sum, 4 * lane_row(lane)), simd_shuffle(sum, 4 * lane_row(lane) + 4));
}
#endif

// copy_ahead and end_copies are cuda.cuh's.
#if IS_STAGED
inline void wait_for_copies() { wait_for_groups_but<STAGES - 2 - LEAD>(); }
#endif
