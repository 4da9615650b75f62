// A product of tiles on simdgroup_matrix: sums[output][row] += weights[output][k] * rows[row][k], 8 outputs by
// 8 rows by 32 of K at a time.
//
// K is taken in blocks of 32: a quarter of the lanes of an output each bring 8 consecutive values, so that weights
// are loaded by 16 bytes a lane and no lane loads what another one uses. Step j of the block multiplies, in the
// lane's quarter, values j and j + 4. That order of K is the same for every kernel and every width: a row's bits
// are those of its own products, whatever rows share the tile.
//
// Where a lane stands: it brings weights of output lane_output of its tile, and of each of the LANE_ROWS rows from
// loaded_row on it brings 4 values of its half of a quarter; of the sums it holds those of output lane_output and
// the 2 rows from lane_row on.
#define BLOCK 32
// Tiles of outputs that are multiplied at a time.
#define TILES_AT_ONCE 1
#define LANE_ROWS 2

// The rows of x of which a lane brings values.
struct LaneRows {
  device const T* at[LANE_ROWS];
};
struct RowsBlock {
  simdgroup_matrix<T, 8, 8> steps[4];
};
struct WeightsBlock {
  simdgroup_matrix<T, 8, 8> steps[4];
};

inline int loaded_row(uint lane) { return lane_row(lane); }

// Rows of x from k on. Quarters of the block lie `span` apart.
inline void load_rows(thread RowsBlock& block, thread const LaneRows& x, int k, int span, uint lane) {
  const int at = k + lane_output(lane) / 2 * span + lane_output(lane) % 2 * 4;
  UNROLL for (int i = 0; i < LANE_ROWS; i++) {
    const vec<T, 4> values = *(device const vec<T, 4>*)(x.at[i] + at);
    UNROLL for (int j = 0; j < 4; j++) block.steps[j].thread_elements()[i] = values[j];
  }
}

// The lane's 8 values of its output's weights.
inline void set_weights(thread WeightsBlock& block, vec<T, 4> low, vec<T, 4> high) {
  UNROLL for (int j = 0; j < 4; j++) {
    block.steps[j].thread_elements()[0] = low[j];
    block.steps[j].thread_elements()[1] = high[j];
  }
}

// sums, weights: of TILES_AT_ONCE tiles.
inline void multiply(thread Sums* sums, thread WeightsBlock* weights, thread RowsBlock& rows) {
  UNROLL for (int j = 0; j < 4; j++) {
    simdgroup_multiply_accumulate(sums[0], weights[0].steps[j], rows.steps[j], sums[0]);
  }
}

// What a block of rows adds up to over its 32 of K, for the lane's two rows: the same bits in every lane of a row.
inline float2 sum_rows(thread RowsBlock& block) {
  float2 sum = float2(0.0f);
  UNROLL for (int j = 0; j < 4; j++) {
    sum.x += float(block.steps[j].thread_elements()[0]);
    sum.y += float(block.steps[j].thread_elements()[1]);
  }
  UNROLL for (int i = 0; i < 3; i++) {
    sum.x += simd_shuffle_xor(sum.x, column_bit(i));
    sum.y += simd_shuffle_xor(sum.y, column_bit(i));
  }
  return sum;
}
