// A threadgroup's sums where there are many rows: each of its SIMD-groups has outputs of its own, and passes through
// all of K with all rows. A weight is read and unpacked once for ROWS rows, straight to the registers of the lanes that
// multiply it, AHEAD units ahead; the rows go through threadgroup memory, which all SIMD-groups read, STAGES - 1 stages
// of K ahead. One barrier a stage, which says that its rows have come and that those of the stage before are done with.
// Rows that packed weights multiply are dealt and added up over each unit once for all, LEAD stages ahead, tile by tile
// by the SIMD-groups. A pass of the loop is a span of SPAN units, so that what belongs to one of them is known
// where it is compiled.
//
// A thread copies the pieces of rows that it holds pointers to, 16 bytes each. It then has the sums of the places that
// its lane has in the simdgroup matrices. 2 * 2 * ROW_TILES * OUTPUT_TILES registers of sums, of a chunk and of all,
// and 2 * TILES_AT_ONCE of a group for each tile of rows that is multiplied at a time.
#define SIMDGROUPS (THREADS / 32)
#define OUTPUTS (TILE * WEIGHT_TILES * SIMDGROUPS)
#define STAGE (STAGE_UNITS * UNIT)
#define NUM_STAGES ((NUM_UNITS + STAGE_UNITS - 1) / STAGE_UNITS)
#define PIECES (STAGE / PIECE)
#define MEMORY Piece
#define STAGED_PIECES (STAGES * ROWS * PITCH / PIECE)
// Of wide.cuh, which takes dealt rows from places of their own.
#define DEALT_PIECES (IS_WIDE * 2 * ROWS * STAGE / PIECE)
#define MEMORY_SIZE (STAGED_PIECES + DEALT_PIECES + LEAD * 2 * STAGE_UNITS * ROWS / 4)
#define NUM_POINTERS (ROWS * PIECES / THREADS)
// The scales of a span lie side by side, where none is short of units.
#define IS_TOGETHER (BITS && NUM_UNITS % SPAN == 0)
#if SPAN % STAGE_UNITS || SPAN % AHEAD
#error "a span has whole stages, and begins where the one before it began to load"
#endif
#if ROW_TILES % SIMDGROUPS
#error "each SIMD-group deals as many tiles of rows"
#endif
#define NUM_TOTALS (2 * ROW_TILES * WEIGHT_TILES)

// 16 bytes of a row.
typedef uint4 Piece;
struct Work {
  device const T* at[NUM_POINTERS];
};
// Where rows are, what they are dealt to and what they add up to: of STAGES stages, and of two each.
struct Staged {
  threadgroup T *rows, *dealt;
  threadgroup float* sums;
};
struct Totals {
  Sums sums[ROW_TILES][OUTPUT_TILES];
};

// Which of the tile's rows a thread's pointer number n is to, and where in the row it begins.
inline int pointed_row(int n, uint thread_index) { return (n * THREADS + int(thread_index)) / PIECES; }
inline int pointed_at(int n, uint thread_index) { return (n * THREADS + int(thread_index)) % PIECES * PIECE; }

// The lane's output of a tile of a weight, among the threadgroup's.
inline int tile_output(int tile, uint thread_index) {
  return TILE * (int(thread_index) / 32 * WEIGHT_TILES + tile) + lane_output(thread_index % 32);
}

inline void copy_stage(thread const Staged& staged, thread Work& work, int stage, uint thread_index) {
  threadgroup T* to = staged.rows + stage % STAGES * (ROWS * PITCH);
  UNROLL for (int n = 0; n < NUM_POINTERS; n++) {
    const int at = pointed_at(n, thread_index), k = stage * STAGE;
    if (k + at < DEPTH) copy_ahead(to + pointed_row(n, thread_index) * PITCH + at, work.at[n] + k);
  }
  end_copies();
}

inline LaneRows staged_rows(thread const Staged& staged, int stage, int tile, uint lane) {
  LaneRows rows;
  UNROLL for (int i = 0; i < LANE_ROWS; i++) {
    rows.at[i] = staged.rows + (stage % STAGES * ROWS + TILE * tile + loaded_row(lane) + i) * PITCH;
  }
  return rows;
}

// What the lane's two rows of a tile add up to over a unit of a stage.
inline threadgroup float* sums_of_rows(thread const Staged& staged, int stage, int u, int tile, uint lane) {
  return staged.sums + (stage % 2 * STAGE_UNITS + u) * ROWS + TILE * tile + lane_row(lane);
}

// A unit of a stage as wide.cuh takes it.
inline threadgroup T* dealt_unit(thread const Staged& staged, int stage, int u) {
  return staged.dealt + stage % 2 * (ROWS * STAGE) + u * (TILE * UNIT);
}

inline void deal_stage(thread const Staged& staged, int stage, thread const Ones& ones, uint thread_index) {
  const uint lane = thread_index % 32;
  UNROLL for (int n = 0; n < ROW_TILES / SIMDGROUPS; n++) {
    const int tile = n * SIMDGROUPS + thread_index / 32;
    LaneRows x = staged_rows(staged, stage, tile, lane);
    UNROLL for (int u = 0; u < STAGE_UNITS; u++) {
      if (stage * STAGE_UNITS + u >= NUM_UNITS) break;
      RowSums sum = float2(0.0f);
      UNROLL for (int b = 0; b < UNIT / BLOCK; b++) {
        RowsBlock rows;
        load_rows(rows, x, u * UNIT + 8 * b, UNIT / 4, lane);
        deal_rows(rows);
#if IS_WIDE
        store_wide(rows, dealt_unit(staged, stage, u), tile, b, lane);
#else
        store_dealt(rows, x, u * UNIT + 8 * b, UNIT / 4, lane);
#endif
        add_rows(sum, rows, ones);
      }
      if (lane_output(lane) == 0) {
        threadgroup float* to = sums_of_rows(staged, stage, u, tile, lane);
        to[0] = sum.x;
        to[1] = sum.y;
      }
    }
  }
#if IS_WIDE
  show_to_products();
#endif
}

template <int TILES>
inline void load_sums_of_rows(
    thread RowSums* to, thread const Staged& staged, int stage, int u, int first, uint lane) {
#if BITS
  UNROLL for (int r = 0; r < TILES; r++) {
    threadgroup const float* from = sums_of_rows(staged, stage, u, first + r, lane);
    to[r] = float2(from[0], from[1]);
  }
#endif
}

// Adds the part of a unit of a stage to the sums of the first TILES tiles of rows.
template <int TILES>
inline void add_staged_unit(
    thread Sums (&sums)[ROW_TILES][OUTPUT_TILES],
    thread const UnitWeights (&weights)[OUTPUT_TILES],
    thread const Staged& staged,
    int stage,
    int u,
    uint lane) {
  UnitBlocks blocks;
  set_blocks(blocks, weights);
#if IS_WIDE
  RowSums row_sums[TILES];
  load_sums_of_rows<TILES>(row_sums, staged, stage, u, 0, lane);
  UNROLL for (int o = 0; o < OUTPUT_TILES; o += TILES_AT_ONCE) {
    Sums products[TILES][TILES_AT_ONCE];
    multiply_unit<TILES>(products, blocks, o, dealt_unit(staged, stage, u));
    add_scaled<TILES>(sums, o, products, weights, row_sums);
  }
#else
  constexpr int COUNT = TILES < ROW_TILES_AT_ONCE ? TILES : ROW_TILES_AT_ONCE;
  UNROLL for (int first = 0; first < TILES; first += COUNT) {
    LaneRows x[ROW_TILES_AT_ONCE];
    UNROLL for (int r = 0; r < COUNT; r++) x[r] = staged_rows(staged, stage, first + r, lane);
    RowSums row_sums[ROW_TILES_AT_ONCE];
    load_sums_of_rows<COUNT>(row_sums, staged, stage, u, first, lane);
    UnitRows rows;
    load_unit_rows<COUNT>(rows, x, u * UNIT, lane);
    add_unit<COUNT>(sums + first, weights, blocks, rows, row_sums);
  }
#endif
}

// A tile's weights from a unit on, where weights[] are at what the lane brings of the first.
inline WeightRow tile_row(thread const WeightRow (&weights)[OUTPUT_TILES], int tile) {
#if IS_WHOLE
  // In one pointer a weight.
  return row_after(weights[tile / WEIGHT_TILES * WEIGHT_TILES], tile % WEIGHT_TILES * TILE);
#else
  return weights[tile];
#endif
}

// What a lane has of the scales of a span.
struct SpanScales {
#if IS_TOGETHER
  Four scales[OUTPUT_TILES], biases[OUTPUT_TILES];
#endif
};

inline void load_scales(thread SpanScales& loaded, thread const WeightRow (&weights)[OUTPUT_TILES], int span) {
#if IS_TOGETHER
  UNROLL for (int o = 0; o < OUTPUT_TILES; o++) {
    const WeightRow row = tile_row(weights, o);
    loaded.scales[o] = load_four(row.scales + span);
    loaded.biases[o] = load_four(row.biases + span);
  }
#endif
}

// What the lane brings of a unit, without the scales of a span. Nothing beyond the last unit.
inline void load_unit_of(
    thread UnitWeights (&loaded)[OUTPUT_TILES], thread const WeightRow (&weights)[OUTPUT_TILES], int unit) {
  if (unit >= NUM_UNITS) return;
  UNROLL for (int o = 0; o < OUTPUT_TILES; o++) {
    const WeightRow row = tile_row(weights, o);
#if IS_TOGETHER
    load_lane_words(loaded[o].words, row, unit);
#else
    load_unit(loaded[o], row, unit);
#endif
  }
}

// The sums of the first TILES tiles of rows.
template <int TILES>
inline void sum_tiles(
    thread Totals& totals,
    threadgroup Piece* memory,
    thread WeightRow (&weights)[OUTPUT_TILES],
    thread Work& work,
    uint thread_index) {
  const Staged staged = {
      (threadgroup T*)memory,
      (threadgroup T*)(memory + STAGED_PIECES),
      (threadgroup float*)(memory + STAGED_PIECES + DEALT_PIECES)};
  const uint lane = thread_index % 32;
  const Ones ones = make_ones();
  Sums sums[ROW_TILES][OUTPUT_TILES];
  clear<TILES>(sums);
  clear<TILES>(totals.sums);
  WeightRow rows[OUTPUT_TILES];
  UNROLL for (int o = 0; o < OUTPUT_TILES; o++) rows[o] = row_from(weights[o], 0, lane);
  UnitWeights ahead[AHEAD][OUTPUT_TILES];
  UNROLL for (int u = 0; u < AHEAD; u++) load_unit_of(ahead[u], rows, u);
  for (int stage = 0; stage < STAGES - 1; stage++) copy_stage(staged, work, stage, thread_index);
#if BITS
  wait_for_copies();
  threadgroup_barrier(mem_flags::mem_threadgroup);
  deal_stage(staged, 0, ones, thread_index);
#endif
  int chunk = 1;
  for (int span = 0; span < NUM_UNITS; span += SPAN) {
    SpanScales scales;
    load_scales(scales, rows, span);
    UNROLL for (int s = 0; s < SPAN; s++) {
      const int unit = span + s, stage = unit / STAGE_UNITS, u = s % STAGE_UNITS;
      if (unit >= NUM_UNITS) break;
      UnitWeights now[OUTPUT_TILES];
      UNROLL for (int o = 0; o < OUTPUT_TILES; o++) {
        now[o] = ahead[s % AHEAD][o];
#if IS_TOGETHER
        now[o].scale = value_of(scales.scales[o], s);
        now[o].bias = value_of(scales.biases[o], s);
#endif
      }
      // Before the barrier, past which no load moves to where its values are used.
      load_unit_of(ahead[s % AHEAD], rows, unit + AHEAD);
      if (u == 0) {
        wait_for_copies();
        threadgroup_barrier(mem_flags::mem_threadgroup);
        copy_stage(staged, work, stage + STAGES - 1, thread_index);
      }
      add_staged_unit<TILES>(sums, now, staged, stage, u, lane);
#if BITS
      // After the products, whose loads could not pass its stores.
      if (u == 0 && stage + 1 < NUM_STAGES) deal_stage(staged, stage + 1, ones, thread_index);
#endif
      if (unit + 1 == chunk_start(chunk)) {
        UNROLL for (int r = 0; r < TILES; r++) {
          UNROLL for (int o = 0; o < OUTPUT_TILES; o++) {
            UNROLL for (int i = 0; i < 2; i++) {
              totals.sums[r][o].thread_elements()[i] += sums[r][o].thread_elements()[i];
            }
          }
        }
        clear<TILES>(sums);
        chunk++;
      }
    }
  }
}

// Of rows that do not fill the tile no more tiles are made than hold some, 1, 2, 4 or 8.
inline void sum_tile(
    thread Totals& totals,
    threadgroup Piece* memory,
    thread WeightRow (&weights)[OUTPUT_TILES],
    thread Work& work,
    int num_rows,
    int turn,
    uint thread_index) {
  if (num_rows > 4 * TILE) {
    sum_tiles<ROW_TILES>(totals, memory, weights, work, thread_index);
  } else if (num_rows > 2 * TILE) {
    sum_tiles<4>(totals, memory, weights, work, thread_index);
  } else if (num_rows > TILE) {
    sum_tiles<2>(totals, memory, weights, work, thread_index);
  } else {
    sum_tiles<1>(totals, memory, weights, work, thread_index);
  }
}

// Where a thread's sum number n belongs in the threadgroup's rows and outputs.
inline Place place_of(int n, uint thread_index) {
  Place place;
  place.row = TILE * (n / (2 * WEIGHT_TILES)) + lane_row(thread_index % 32) + n % 2;
  place.output = tile_output(n / 2 % WEIGHT_TILES, thread_index);
  return place;
}

// A sum with one of the weights.
inline float total_of(thread Totals& totals, int n, int weight, uint thread_index) {
  const int tile = weight * WEIGHT_TILES + n / 2 % WEIGHT_TILES;
  return totals.sums[n / (2 * WEIGHT_TILES)][tile].thread_elements()[n % 2];
}
