// tile.metal for NVIDIA GPUs: 16 outputs by 8 rows by 16 of K at a time, as tensor cores multiply.
//
// Blocks of K and their quarters are tile.metal's. A lane brings all 8 values of its quarter for both operands, of
// output lane_output of two tiles and of row loaded_row: the tensor cores take both with K along the lanes. Step j
// multiplies, in the lane's quarter, values j and j + 4. With fp32 the lanes pass their values around.
#define BLOCK 32
#if OUTPUT_TILES % 2
#define TILES_AT_ONCE 1
#else
#define TILES_AT_ONCE 2
#endif
#define LANE_ROWS 1

struct LaneRows {
  device const T* at[LANE_ROWS];
};
struct RowsBlock {
  vec<T, 2> steps[4];
};
struct WeightsBlock {
  vec<T, 2> steps[4];
};

inline int loaded_row(uint lane) { return lane_output(lane); }

inline void load_rows(thread RowsBlock& block, thread const LaneRows& x, int k, int span, uint lane) {
  device const T* from = x.at[0] + k + lane_quarter(lane) * span;
  const vec<T, 4> low = *(device const vec<T, 4>*)from;
  const vec<T, 4> high = *(device const vec<T, 4>*)(from + 4);
  for (int j = 0; j < 4; j++) block.steps[j] = vec<T, 2>(low[j], high[j]);
}

inline void set_weights(thread WeightsBlock& block, vec<T, 4> low, vec<T, 4> high) {
  for (int j = 0; j < 4; j++) block.steps[j] = vec<T, 2>(low[j], high[j]);
}

#if IS_HALF || IS_BFLOAT
inline void multiply(thread Sums* sums, thread WeightsBlock* weights, thread RowsBlock& rows) {
  for (int j = 0; j < 4; j += 2) {
#if TILES_AT_ONCE == 2
    multiply_by_16(
        sums[0].elements, sums[1].elements, weights[0].steps + j, weights[1].steps + j, rows.steps + j);
#else
    float2 unused = float2(0.0f);
    const vec<T, 2> none[2] = {as_type<vec<T, 2>>(0u), as_type<vec<T, 2>>(0u)};
    multiply_by_16(sums[0].elements, unused, weights[0].steps + j, none, rows.steps + j);
#endif
  }
}
#else
inline void multiply(thread Sums* sums, thread WeightsBlock* weights, thread RowsBlock& rows) {
  const uint lane = threadIdx.x % 32;
  for (int j = 0; j < 4; j++) {
    for (int quarter = 0; quarter < 4; quarter++) {
      for (int h = 0; h < 2; h++) {
        float x[2];
        for (int i = 0; i < 2; i++) x[i] = simd_shuffle(rows.steps[j][h], 4 * (lane_row(lane) + i) + quarter);
        for (int t = 0; t < TILES_AT_ONCE; t++) {
          const float weight = simd_shuffle(weights[t].steps[j][h], 4 * lane_output(lane) + quarter);
          for (int i = 0; i < 2; i++) sums[t].elements[i] = fma(weight, x[i], sums[t].elements[i]);
        }
      }
    }
  }
}
#endif

inline float2 sum_rows(thread RowsBlock& block) {
  const uint lane = threadIdx.x % 32;
  float sum = 0;
  for (int j = 0; j < 4; j++) sum += float(block.steps[j][0]);
  for (int j = 0; j < 4; j++) sum += float(block.steps[j][1]);
  for (int i = 0; i < 2; i++) sum += simd_shuffle_xor(sum, 1 << i);
  return float2(simd_shuffle(sum, 4 * lane_row(lane)), simd_shuffle(sum, 4 * lane_row(lane) + 4));
}
