// Sums of products of rows with stored weights: what matmul, gate_up, project and the experts share.
//
// A threadgroup makes the sums of OUTPUTS outputs and ROWS rows, each of its SIMD-groups those over one of CHUNKS
// chunks of K; after a barrier the chunks are added in order. CHUNKS depends on the weight's shape alone, and every
// product goes through simdgroup matrices at every width: a row's bits never depend on its company. A round of one row
// pays for that with 7 of 8 columns idle, which weights read from memory hide as long as a chip has arithmetic to spare:
// reckoned, not measured, an M4 Max has for bf16 and 8 bits, and nearly for 4. On a Mac that is what to measure first.
//
// Weights are plain values of type W, or MLX's codes of BITS bits with a scale and a bias of type S for each GROUP of K.
// A packed weight is code * scale + bias, so a group's part of a sum is scale * (codes . x) + bias * (sum of x): the
// codes are multiplied as they are, which every type holds exactly, and nothing is rounded to T before the end.
// A unit of K is a block, or a group where there are groups.
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
#define OUTPUTS (TILE * OUTPUT_TILES)
#define ROWS (TILE * ROW_TILES)

// Few rows wait for their weights: loads of several units are in flight at a time.
#if ROW_TILES == 1
#define AHEAD UNROLL_BY_4
#else
#define AHEAD
#endif

// The first unit of a chunk of K: CHUNKS of them, as even as they can be.
inline int chunk_start(int chunk) { return chunk * NUM_UNITS / CHUNKS; }

#if BITS == 4
// Two codes, each in its half of a word, as T.
inline vec<T, 2> to_values(uint two) {
#if IS_HALF
  return as_type<half2>(two | 0x64006400u) - half2(1024.0h);
#elif IS_BFLOAT
  return as_type<bfloat2>(two | 0x43004300u) - bfloat2(bfloat(128.0f));
#else
  vec<T, 2> values;
  values[0] = T(two & 0xffffu);
  values[1] = T(two >> 16);
  return values;
#endif
}
#endif

inline void load_weights(thread WeightsBlock& block, thread const WeightRow& row, int at) {
  vec<T, 4> low, high;
#if BITS == 4
  const uint word = row.codes[at / 8];
  UNROLL for (int j = 0; j < 4; j++) {
    const vec<T, 2> two = to_values((word >> (4 * j)) & 0x000f000fu);
    low[j] = two[0];
    high[j] = two[1];
  }
#elif BITS == 8
  const uint2 words = *(device const uint2*)(row.codes + at / 4);
  UNROLL for (int j = 0; j < 4; j++) {
    low[j] = T(float((words.x >> (8 * j)) & 0xffu));
    high[j] = T(float((words.y >> (8 * j)) & 0xffu));
  }
#else
  const vec<W, 4> a = *(device const vec<W, 4>*)(row.values + at);
  const vec<W, 4> b = *(device const vec<W, 4>*)(row.values + at + 4);
  UNROLL for (int j = 0; j < 4; j++) {
    low[j] = T(float(a[j]));
    high[j] = T(float(b[j]));
  }
#endif
  set_weights(block, low, high);
}

// The tile's sums over a chunk of K, to partial[row][output]. weights: of the lane's output of each tile; x: the
// rows of each tile of which the lane brings values.
inline void sum_chunk(
    threadgroup float* partial,
    thread WeightRow (&weights)[OUTPUT_TILES],
    thread LaneRows (&x)[ROW_TILES],
    int chunk,
    uint lane) {
  Sums sums[ROW_TILES][OUTPUT_TILES];
  UNROLL for (int r = 0; r < ROW_TILES; r++) {
    UNROLL for (int o = 0; o < OUTPUT_TILES; o++) sums[r][o] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  const int span = UNIT / 4, first = chunk_start(chunk);
#if NUM_UNITS % CHUNKS == 0
  const int count = NUM_UNITS / CHUNKS;
#else
  const int count = chunk_start(chunk + 1) - first;
#endif
  AHEAD for (int i = 0; i < count; i++) {
    const int unit = first + i;
#if BITS
    Sums products[ROW_TILES][OUTPUT_TILES];
    float2 totals[ROW_TILES];
    UNROLL for (int r = 0; r < ROW_TILES; r++) {
      UNROLL for (int o = 0; o < OUTPUT_TILES; o++) products[r][o] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
      totals[r] = float2(0.0f);
    }
#else
    // Without groups there is nothing between a product and the chunk's sum.
#define products sums
#endif
    // One block at a time, so that few values of rows and weights are held.
    UNROLL for (int b = 0; b < UNIT / BLOCK; b++) {
      const int k = unit * UNIT + 8 * b;
      RowsBlock rows[ROW_TILES];
      UNROLL for (int r = 0; r < ROW_TILES; r++) {
        load_rows(rows[r], x[r], k, span, lane);
#if BITS
        totals[r] += sum_rows(rows[r]);
#endif
      }
      UNROLL for (int o = 0; o < OUTPUT_TILES; o += TILES_AT_ONCE) {
        WeightsBlock blocks[TILES_AT_ONCE];
        UNROLL for (int i = 0; i < TILES_AT_ONCE; i++) {
          load_weights(blocks[i], weights[o + i], k + lane_quarter(lane) * span);
        }
        UNROLL for (int r = 0; r < ROW_TILES; r++) multiply(products[r] + o, blocks, rows[r]);
      }
    }
#if BITS
    UNROLL for (int o = 0; o < OUTPUT_TILES; o++) {
      const float scale = float(weights[o].scales[unit]), bias = float(weights[o].biases[unit]);
      UNROLL for (int r = 0; r < ROW_TILES; r++) {
        UNROLL for (int i = 0; i < 2; i++) {
          const float scaled = fma(scale, products[r][o].thread_elements()[i], sums[r][o].thread_elements()[i]);
          sums[r][o].thread_elements()[i] = fma(bias, totals[r][i], scaled);
        }
      }
    }
#endif
  }
  UNROLL for (int o = 0; o < OUTPUT_TILES; o++) {
    UNROLL for (int r = 0; r < ROW_TILES; r++) {
      UNROLL for (int i = 0; i < 2; i++) {
        const int row = TILE * r + lane_row(lane) + i;
        partial[row * OUTPUTS + TILE * o + lane_output(lane)] = sums[r][o].thread_elements()[i];
      }
    }
  }
}

// The lane's rows of a tile that starts at first_row. Those beyond the last take it again, and are not stored.
inline void find_rows(thread LaneRows (&rows)[ROW_TILES], device const T* x, int first_row, uint lane) {
  UNROLL for (int r = 0; r < ROW_TILES; r++) {
    const int row = first_row + TILE * r + loaded_row(lane);
    UNROLL for (int i = 0; i < LANE_ROWS; i++) rows[r].at[i] = x + size_t(min(row + i, NUM_ROWS - 1)) * DEPTH;
  }
}

// An element's sum over all chunks, in order.
inline float fold(threadgroup float (&partial)[CHUNKS][ROWS * OUTPUTS], int element) {
  float sum = partial[0][element];
  for (int chunk = 1; chunk < CHUNKS; chunk++) sum += partial[chunk][element];
  return sum;
}

// Where a threadgroup's first half of outputs is a gate's and the second half the other factor's: their product.
#define HALF_TILES (OUTPUT_TILES / 2)
#define HALF_OUTPUTS (OUTPUTS / 2)
inline T swiglu(float gate, float up) {
  const float g = float(T(gate));
  return T(float(T(g / (1 + exp(-g)))) * float(T(up)));
}
inline T fold_swiglu(threadgroup float (&partial)[CHUNKS][ROWS * OUTPUTS], int row, int output) {
  const int element = row * OUTPUTS + output;
  return swiglu(fold(partial, element), fold(partial, element + HALF_OUTPUTS));
}
