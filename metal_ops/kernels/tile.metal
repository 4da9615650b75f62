// A product of tiles on simdgroup_matrix: sums[output][row] += weights[output][k] * rows[row][k], 8 outputs by
// 8 rows by 32 of K at a time.
//
// K is taken in blocks of 32: a quarter of the lanes of an output each bring 8 consecutive values, so that weights
// are loaded by 16 bytes a lane and no lane loads what another one uses. Step j of the block multiplies, in the
// lane's quarter, values j and j + 4. That order of K is the same for every kernel and every width: a row's bits
// are those of its own products, whatever rows share the tile.
//
// Where a lane stands: it brings weights of output lane_output of its tile, and of each of the 2 rows from
// lane_row on it brings 4 values of its half of a quarter; of the sums it holds those of output lane_output and
// the 2 rows from lane_row on. (The layout of a simdgroup matrix, which MLX and tinygrad rely on too.)
#define TILE 8
#define BLOCK 32

typedef simdgroup_matrix<float, 8, 8> Sums;
// The two rows of x of which a lane brings values.
struct RowPair {
  device const T* first;
  device const T* second;
};
struct RowsBlock {
  simdgroup_matrix<T, 8, 8> steps[4];
};
struct WeightsBlock {
  simdgroup_matrix<T, 8, 8> steps[4];
};

inline int lane_output(uint lane) { return int((lane / 4 & 4) + lane / 2 % 4); }
inline int lane_quarter(uint lane) { return int((lane / 4 & 2) + lane % 2); }
inline int lane_row(uint lane) { return 2 * lane_quarter(lane); }

// Rows of x from k on. Quarters of the block lie `span` apart.
inline void load_rows(thread RowsBlock& block, thread const RowPair& x, int k, int span, uint lane) {
  const int at = k + lane_output(lane) / 2 * span + lane_output(lane) % 2 * 4;
  const vec<T, 4> a = *(device const vec<T, 4>*)(x.first + at);
  const vec<T, 4> b = *(device const vec<T, 4>*)(x.second + at);
  for (int j = 0; j < 4; j++) {
    block.steps[j].thread_elements()[0] = a[j];
    block.steps[j].thread_elements()[1] = b[j];
  }
}

// The lane's 8 values of its output's weights.
inline void set_weights(thread WeightsBlock& block, vec<T, 4> low, vec<T, 4> high) {
  for (int j = 0; j < 4; j++) {
    block.steps[j].thread_elements()[0] = low[j];
    block.steps[j].thread_elements()[1] = high[j];
  }
}

inline void multiply(thread Sums& sums, thread WeightsBlock& weights, thread RowsBlock& rows) {
  for (int j = 0; j < 4; j++) {
    simdgroup_multiply_accumulate(sums, weights.steps[j], rows.steps[j], sums);
  }
}

// What a block of rows adds up to over its 32 of K, for the lane's two rows: the same bits in every lane of a row.
inline float2 sum_rows(thread RowsBlock& block) {
  float2 sum = float2(0.0f);
  for (int j = 0; j < 4; j++) {
    sum.x += float(block.steps[j].thread_elements()[0]);
    sum.y += float(block.steps[j].thread_elements()[1]);
  }
  // The lanes that hold the same two rows differ in these bits.
  for (int bit = 0; bit < 3; bit++) {
    const ushort other = bit == 2 ? 16 : 2 << bit;
    sum.x += simd_shuffle_xor(sum.x, other);
    sum.y += simd_shuffle_xor(sum.y, other);
  }
  return sum;
}
