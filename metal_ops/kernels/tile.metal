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

// The rows of x of which a lane brings values, out of memory or, where they are staged there, threadgroup memory.
#if IS_STAGED
#define ROWS_SPACE threadgroup
#else
#define ROWS_SPACE device
#endif
struct LaneRows {
  ROWS_SPACE const T* at[LANE_ROWS];
};
struct RowsBlock {
  simdgroup_matrix<T, 8, 8> steps[4];
};
struct WeightsBlock {
  simdgroup_matrix<T, 8, 8> steps[4];
};

inline int loaded_row(uint lane) { return lane_row(lane); }

// Rows of x from k on. Quarters of the block begin `distance` after each other.
inline void load_rows(thread RowsBlock& block, thread const LaneRows& x, int k, int distance, uint lane) {
  const int at = k + lane_output(lane) / 2 * distance + lane_output(lane) % 2 * 4;
  UNROLL for (int i = 0; i < LANE_ROWS; i++) {
    const vec<T, 4> values = *(ROWS_SPACE const vec<T, 4>*)(x.at[i] + at);
    UNROLL for (int j = 0; j < 4; j++) block.steps[j].thread_elements()[i] = values[j];
  }
}

// True; what comes after needs all loads that come before. For tile.cuh, which says why.
inline bool hold_loads(int simdgroup) { return true; }
template <typename V>
inline V load_early(device const V* from) { return *from; }
#if BITS
typedef vec<S, 4> Four;
inline Four load_four(device const S* from) { return *(device const Four*)from; }
inline S value_of(Four four, int i) { return four[i]; }
#endif

// For tile.cuh, which needs the values of rows in another order.
inline void deal_rows(thread RowsBlock& block) {}
inline void store_dealt(thread const RowsBlock& block, thread LaneRows& x, int k, int distance, uint lane) {}

// The lane's 8 values of its output's weights, in pairs: values j and j + 4, or 2j and 2j + 1.
inline void set_apart(thread WeightsBlock& block, thread const vec<T, 2> (&pairs)[4]) {
  UNROLL for (int j = 0; j < 4; j++) {
    UNROLL for (int h = 0; h < 2; h++) block.steps[j].thread_elements()[h] = pairs[j][h];
  }
}
inline void set_side_by_side(thread WeightsBlock& block, thread const vec<T, 2> (&pairs)[4]) {
  UNROLL for (int j = 0; j < 4; j++) {
    block.steps[j].thread_elements()[0] = pairs[j / 2][j % 2];
    block.steps[j].thread_elements()[1] = pairs[2 + j / 2][j % 2];
  }
}

// Of the first TILES tiles of rows, with the weights of TILES_AT_ONCE tiles: sums from number `first` on.
template <int TILES, int N>
inline void multiply(thread Sums (*sums)[N], int first, thread WeightsBlock* weights, thread RowsBlock* rows) {
  UNROLL for (int j = 0; j < 4; j++) {
    UNROLL for (int r = 0; r < TILES; r++) {
      simdgroup_multiply_accumulate(sums[r][first], weights[0].steps[j], rows[r].steps[j], sums[r][first]);
    }
  }
}

// NVIDIA's tensor cores make the sums of rows as a product with ones.
struct Ones {};
inline Ones make_ones() { return Ones{}; }
// Adds what a block of rows adds up to over its 32 of K, for the lane's two rows: the same bits in every lane of a row.
inline void add_rows(thread float2& total, thread RowsBlock& block, thread const Ones& ones) {
  float2 sum = float2(0.0f);
  UNROLL for (int j = 0; j < 4; j++) {
    sum.x += float(block.steps[j].thread_elements()[0]);
    sum.y += float(block.steps[j].thread_elements()[1]);
  }
  UNROLL for (int i = 0; i < 3; i++) {
    sum.x += simd_shuffle_xor(sum.x, column_bit(i));
    sum.y += simd_shuffle_xor(sum.y, column_bit(i));
  }
  total += sum;
}

// The bits of a word that are in the mask, and others.
inline uint masked_or(uint word, uint mask, uint others) { return (word & mask) | others; }

// Copies 16 bytes of rows to threadgroup memory. A wait is over when all copies have come but those of the last
// STAGES - 2 - LEAD ends.
inline void copy_ahead(threadgroup T* to, device const T* from) {
  *(threadgroup uint4*)to = *(device const uint4*)from;
}
inline void end_copies() {}
inline void wait_for_copies() {}
