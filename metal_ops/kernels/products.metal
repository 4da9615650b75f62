// Sums of products of rows with stored weights: what matmul, gate_up, project and the experts share.
//
// A sum over K is the sum of CHUNKS chunks of K, added in order. CHUNKS depends on the weight's shape alone, and every
// product goes through simdgroup matrices at every width: a row's bits never depend on its company. Two texts make the
// sums of a threadgroup's outputs and rows: few_rows, where its SIMD-groups share the outputs and have a chunk each,
// and many_rows, where each has outputs of its own and passes through all of K.
//
// Weights are plain values of type W, or MLX's codes of BITS bits with a scale and a bias of type S for each GROUP of
// K. A packed weight is code * scale + bias, so a group's part of a sum is scale * (codes . x) + bias * (sum of x): the
// codes, or 16 more, are multiplied as they are, which every type holds exactly, and nothing is rounded to T before the
// end.
// A unit of K is a block, or a group where there are groups; a lane brings a quarter of it, STORED_BITS a value.
#if BITS
#define UNIT GROUP
#define WEIGHT_BUFFERS(name) \
  device const uint *name##_codes, device const S *name##_scales, device const S *name##_biases
#define WEIGHT_ROW(name, row) \
  WeightRow{name##_codes + size_t(row) * (DEPTH * BITS / 32), name##_scales + size_t(row) * (DEPTH / GROUP), \
            name##_biases + size_t(row) * (DEPTH / GROUP)}
struct WeightRow {
  device const uint* codes;
  device const S* scales;
  device const S* biases;
};
#else
#define UNIT BLOCK
#define WEIGHT_BUFFERS(name) device const W* name##_values
#define WEIGHT_ROW(name, row) WeightRow{name##_values + size_t(row) * DEPTH}
struct WeightRow {
  device const W* values;
};
#endif
#define NUM_UNITS (DEPTH / UNIT)
#define LANE_WORDS (UNIT * STORED_BITS / 128)
#define ROWS (TILE * ROW_TILES)
// Tiles of a weight, of the WEIGHTS that a threadgroup multiplies its rows with, and outputs of each.
#define WEIGHT_TILES (OUTPUT_TILES / WEIGHTS)

// Where a sum belongs in a threadgroup's rows and outputs.
struct Place {
  int row, output;
};

// What the lane's two rows of a tile add up to over a unit.
typedef float2 RowSums;

// What a lane brings of an output's weights for a unit.
struct UnitWeights {
  uint words[LANE_WORDS];
#if BITS
  S scale, bias;
#endif
};

// The first unit of a chunk of K: CHUNKS of them, as even as they can be.
inline int chunk_start(int chunk) { return chunk * NUM_UNITS / CHUNKS; }

// Outputs beyond the last take its weights again, and are not stored.
inline int stored_output(int output, int num_outputs) {
#if IS_WHOLE
  return output;
#else
  return min(output, num_outputs - 1);
#endif
}

// A row from a unit on, at what the lane brings of it.
inline WeightRow row_from(thread const WeightRow& row, int unit, uint lane) {
  const size_t words = (4 * size_t(unit) + lane_quarter(lane)) * LANE_WORDS;
#if BITS
  return WeightRow{row.codes + words, row.scales + unit, row.biases + unit};
#else
  return WeightRow{row.values + words * (32 / STORED_BITS)};
#endif
}

// The row that comes so many after another.
inline WeightRow row_after(thread const WeightRow& row, int after) {
#if BITS
  return WeightRow{row.codes + after * (DEPTH * BITS / 32), row.scales + after * (DEPTH / GROUP),
                   row.biases + after * (DEPTH / GROUP)};
#else
  return WeightRow{row.values + after * DEPTH};
#endif
}

// What the lane brings of the unit that comes so many after that from which the row is.
inline void load_lane_words(thread uint (&words)[LANE_WORDS], thread const WeightRow& row, int after) {
#if BITS
  device const uint* from = row.codes + 4 * after * LANE_WORDS;
#else
  device const uint* from = (device const uint*)row.values + 4 * after * LANE_WORDS;
#endif
#if LANE_WORDS % 4 == 0
  UNROLL for (int i = 0; i < LANE_WORDS; i += 4) {
    const uint4 loaded = load_early((device const uint4*)(from + i));
    UNROLL for (int j = 0; j < 4; j++) words[i + j] = loaded[j];
  }
#elif LANE_WORDS == 2
  const uint2 loaded = load_early((device const uint2*)from);
  words[0] = loaded[0];
  words[1] = loaded[1];
#elif LANE_WORDS == 1
  words[0] = load_early(from);
#else
#error "of a unit a lane takes 1, 2 or a multiple of 4 words"
#endif
}

inline void load_unit(thread UnitWeights& weights, thread const WeightRow& row, int after) {
  load_lane_words(weights.words, row, after);
#if BITS
  weights.scale = load_early(row.scales + after);
  weights.bias = load_early(row.biases + after);
#endif
}

// What is added to each value of codes as they are multiplied, and taken from their sums again with the bias.
#if BITS == 4 && (IS_HALF || IS_BFLOAT)
#define OFFSET 16
#else
#define OFFSET 0
#endif
#if BITS == 4
// Codes j and j + 4 of a word, as T. In two bytes 16 + code is a number with the code as its highest fraction bits.
inline vec<T, 2> to_values(uint word, int j) {
#if IS_HALF
  const int bit = 4 * j - 6;
  const uint codes = 0x03c003c0u, sixteen = 0x4c004c00u;
#elif IS_BFLOAT
  const int bit = 4 * j - 3;
  const uint codes = 0x00780078u, sixteen = 0x41804180u;
#endif
#if OFFSET
  return as_type<vec<T, 2>>(masked_or(bit < 0 ? word << -bit : word >> bit, codes, sixteen));
#else
  vec<T, 2> values;
  for (int h = 0; h < 2; h++) values[h] = T((word >> (4 * j + 16 * h)) & 0xfu);
  return values;
#endif
}
#elif BITS == 8
// Two codes, the low ones of a word, as T.
inline vec<T, 2> to_values(uint two) {
  vec<T, 2> values;
  values[0] = T(float(two & 0xffu));
  values[1] = T(float((two >> 8) & 0xffu));
  return values;
}
#elif STORED_BITS == 16
#if IS_SAME
inline vec<T, 2> to_values(uint two) { return as_type<vec<T, 2>>(two); }
#else
inline vec<T, 2> to_values(uint two) {
  const vec<W, 2> stored = as_type<vec<W, 2>>(two);
  vec<T, 2> values;
  for (int h = 0; h < 2; h++) values[h] = T(float(stored[h]));
  return values;
}
#endif
#endif

// The lane's 8 weights of a block of the unit.
inline void set_block(thread WeightsBlock& block, thread const UnitWeights& weights, int number) {
  vec<T, 2> pairs[4];
#if BITS == 4
  UNROLL for (int j = 0; j < 4; j++) pairs[j] = to_values(weights.words[number], j);
  set_apart(block, pairs);
#else
  UNROLL for (int j = 0; j < 4; j++) {
#if BITS == 8
    pairs[j] = to_values(weights.words[2 * number + j / 2] >> (j % 2 * 16));
#elif STORED_BITS == 16
    pairs[j] = to_values(weights.words[j]);
#else
    UNROLL for (int h = 0; h < 2; h++) pairs[j][h] = T(float(as_type<W>(weights.words[2 * j + h])));
#endif
  }
  set_side_by_side(block, pairs);
#endif
}

template <int TILES, int M, int N>
inline void clear(thread Sums (&sums)[M][N]) {
  UNROLL for (int r = 0; r < TILES; r++) {
    UNROLL for (int o = 0; o < N; o++) sums[r][o] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
}

// Tiles of rows that are multiplied at a time, as TILES_AT_ONCE of outputs are.
#define ROW_TILES_AT_ONCE (ROW_TILES < 4 ? ROW_TILES : 4)

// The lane's values of a unit of the first TILES tiles of rows, which begins at `at`.
typedef RowsBlock UnitRows[UNIT / BLOCK][ROW_TILES_AT_ONCE];
template <int TILES>
inline void load_unit_rows(thread UnitRows& rows, thread LaneRows (&x)[ROW_TILES_AT_ONCE], int at, uint lane) {
  UNROLL for (int b = 0; b < UNIT / BLOCK; b++) {
    UNROLL for (int r = 0; r < TILES; r++) load_rows(rows[b][r], x[r], at + 8 * b, UNIT / 4, lane);
  }
}

// The lane's weights of a unit, as they are multiplied.
typedef WeightsBlock UnitBlocks[UNIT / BLOCK][OUTPUT_TILES];
inline void set_blocks(thread UnitBlocks& blocks, thread const UnitWeights (&weights)[OUTPUT_TILES]) {
  UNROLL for (int b = 0; b < UNIT / BLOCK; b++) {
    UNROLL for (int o = 0; o < OUTPUT_TILES; o++) set_block(blocks[b][o], weights[o], b);
  }
}

#if BITS
// What a group's products come to, with the weights of TILES_AT_ONCE tiles from number `first` on.
template <int TILES>
inline void add_scaled(
    thread Sums (*sums)[OUTPUT_TILES],
    int first,
    thread Sums (*products)[TILES_AT_ONCE],
    thread const UnitWeights (&weights)[OUTPUT_TILES],
    thread const RowSums* row_sums) {
  UNROLL for (int t = 0; t < TILES_AT_ONCE; t++) {
    const float scale = float(weights[first + t].scale);
    const float bias = fma(-float(OFFSET), scale, float(weights[first + t].bias));
    UNROLL for (int r = 0; r < TILES; r++) {
      UNROLL for (int i = 0; i < 2; i++) {
        const float scaled = fma(scale, products[r][t].thread_elements()[i], sums[r][first + t].thread_elements()[i]);
        sums[r][first + t].thread_elements()[i] = fma(bias, row_sums[r][i], scaled);
      }
    }
  }
}
#endif

// Adds a unit's part of the sums of the first TILES tiles: tile by tile of outputs, so that a group's own sums take few
// registers.
template <int TILES>
inline void add_unit(
    thread Sums (*sums)[OUTPUT_TILES],
    thread const UnitWeights (&weights)[OUTPUT_TILES],
    thread UnitBlocks& blocks,
    thread UnitRows& rows,
    thread RowSums (&row_sums)[ROW_TILES_AT_ONCE]) {
  UNROLL for (int o = 0; o < OUTPUT_TILES; o += TILES_AT_ONCE) {
#if BITS
    Sums products[TILES][TILES_AT_ONCE];
    clear<TILES>(products);
#endif
    UNROLL for (int b = 0; b < UNIT / BLOCK; b++) {
#if BITS
      multiply<TILES>(products, 0, blocks[b] + o, rows[b]);
#else
      // Without groups there is nothing between a product and the chunk's sum.
      multiply<TILES>(sums, o, blocks[b] + o, rows[b]);
#endif
    }
#if BITS
    add_scaled<TILES>(sums, o, products, weights, row_sums);
#endif
  }
}

inline T swiglu(float gate, float up) {
  const float g = float(T(gate));
  return T(float(T(g / (1 + exp(-g)))) * float(T(up)));
}
