// A threadgroup's sums where there are many rows: each of its SIMD-groups has outputs of its own, and passes through
// all of K with all rows. A weight is read and unpacked once for ROWS rows, straight to the registers of the lanes that
// multiply it, a stage ahead; the rows go through threadgroup memory, which all SIMD-groups read, STAGES - 1 stages of
// K ahead. One barrier a stage, which says that its rows have come and that those of the stage before are done with.
// What rows add up to over a unit of packed weights is made once for all, LEAD stages ahead, by a SIMD-group a tile of
// rows.
//
// A thread copies the pieces of rows that it holds pointers to, 16 bytes each. It then has the sums of the places that
// its lane has in the simdgroup matrices. 3 * 2 * ROW_TILES * OUTPUT_TILES registers of sums: of a group, of a chunk
// and of all.
#define SIMDGROUPS (THREADS / 32)
#define OUTPUTS (TILE * WEIGHT_TILES * SIMDGROUPS)
#define STAGE (STAGE_UNITS * UNIT)
#define NUM_STAGES ((NUM_UNITS + STAGE_UNITS - 1) / STAGE_UNITS)
#define PIECES (STAGE / PIECE)
#define MEMORY Piece
#define STAGED_PIECES (STAGES * ROWS * PITCH / PIECE)
#define MEMORY_SIZE (STAGED_PIECES + LEAD * 2 * STAGE_UNITS * ROWS / 4)
#define NUM_POINTERS (ROWS * PIECES / THREADS)
#define NUM_TOTALS (2 * ROW_TILES * WEIGHT_TILES)

// 16 bytes of a row.
typedef uint4 Piece;
struct Work {
  device const T* at[NUM_POINTERS];
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

inline void copy_stage(threadgroup T* staged, thread Work& work, int stage, uint thread_index) {
  threadgroup T* to = staged + stage % STAGES * (ROWS * PITCH);
  UNROLL for (int n = 0; n < NUM_POINTERS; n++) {
    const int at = pointed_at(n, thread_index), k = stage * STAGE;
    if (k + at < DEPTH) copy_ahead(to + pointed_row(n, thread_index) * PITCH + at, work.at[n] + k);
  }
  end_copies();
}

inline LaneRows staged_rows(threadgroup T* staged, int stage, int tile, uint lane) {
  LaneRows rows;
  UNROLL for (int i = 0; i < LANE_ROWS; i++) {
    rows.at[i] = staged + (stage % STAGES * ROWS + TILE * tile + loaded_row(lane) + i) * PITCH;
  }
  return rows;
}

// What the rows of a stage add up to, to row_sums[stage % 2][unit][row].
inline void sum_rows_of_stage(
    threadgroup float* row_sums, threadgroup T* staged, int stage, thread const Ones& ones, uint thread_index) {
  const uint lane = thread_index % 32;
  const int tile = thread_index / 32;
  if (tile >= ROW_TILES) return;
#if THREADS < 32 * ROW_TILES
#error "each tile of rows has a SIMD-group that adds it up"
#endif
  LaneRows x = staged_rows(staged, stage, tile, lane);
  UNROLL for (int u = 0; u < STAGE_UNITS; u++) {
    if (stage * STAGE_UNITS + u >= NUM_UNITS) break;
    RowSums sum = float2(0.0f);
    UNROLL for (int b = 0; b < UNIT / BLOCK; b++) {
      RowsBlock rows;
      load_rows(rows, x, u * UNIT + 8 * b, UNIT / 4, lane);
      deal_rows(rows);
      store_dealt(rows, x, u * UNIT + 8 * b, UNIT / 4, lane);
      add_rows(sum, rows, ones);
    }
    if (lane_output(lane) == 0) {
      threadgroup float* to = row_sums + (stage % 2 * STAGE_UNITS + u) * ROWS + TILE * tile + lane_row(lane);
      to[0] = sum.x;
      to[1] = sum.y;
    }
  }
}

inline void load_stage(
    thread UnitWeights (&loaded)[STAGE_UNITS][OUTPUT_TILES],
    thread WeightRow (&weights)[OUTPUT_TILES],
    int stage,
    uint lane) {
  // Units beyond the last are it again, and are not added.
  const int first = min(stage, NUM_STAGES - 1) * STAGE_UNITS;
  UNROLL for (int o = 0; o < OUTPUT_TILES; o++) {
    const WeightRow row = row_from(weights[o], first, lane);
    UNROLL for (int u = 0; u < STAGE_UNITS; u++) {
#if NUM_UNITS % STAGE_UNITS == 0
      load_unit(loaded[u][o], row, u);
#else
      load_unit(loaded[u][o], row, min(u, NUM_UNITS - 1 - first));
#endif
    }
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
  threadgroup T* staged = (threadgroup T*)memory;
  threadgroup float* row_sums = (threadgroup float*)(memory + STAGED_PIECES);
  const uint lane = thread_index % 32;
  const Ones ones = make_ones();
  Sums sums[ROW_TILES][OUTPUT_TILES];
  clear<TILES>(sums);
  clear<TILES>(totals.sums);
  UnitWeights next[STAGE_UNITS][OUTPUT_TILES];
  load_stage(next, weights, 0, lane);
  for (int stage = 0; stage < STAGES - 1; stage++) copy_stage(staged, work, stage, thread_index);
#if BITS
  wait_for_copies();
  threadgroup_barrier(mem_flags::mem_threadgroup);
  sum_rows_of_stage(row_sums, staged, 0, ones, thread_index);
#endif
  int chunk = 1;
  for (int stage = 0; stage < NUM_STAGES; stage++) {
    UnitWeights now[STAGE_UNITS][OUTPUT_TILES];
    UNROLL for (int u = 0; u < STAGE_UNITS; u++) {
      UNROLL for (int o = 0; o < OUTPUT_TILES; o++) now[u][o] = next[u][o];
    }
    // Before the barrier, past which no load moves to where its values are used.
    load_stage(next, weights, stage + 1, lane);
    wait_for_copies();
    threadgroup_barrier(mem_flags::mem_threadgroup);
    copy_stage(staged, work, stage + STAGES - 1, thread_index);
#if BITS
    if (stage + 1 < NUM_STAGES) sum_rows_of_stage(row_sums, staged, stage + 1, ones, thread_index);
#endif
    LaneRows x[ROW_TILES];
    UNROLL for (int r = 0; r < TILES; r++) x[r] = staged_rows(staged, stage, r, lane);
    UNROLL for (int u = 0; u < STAGE_UNITS; u++) {
      const int unit = stage * STAGE_UNITS + u;
      if (unit >= NUM_UNITS) break;
      RowSums sums_of_rows[ROW_TILES];
#if BITS
      UNROLL for (int r = 0; r < TILES; r++) {
        threadgroup const float* from = row_sums + (stage % 2 * STAGE_UNITS + u) * ROWS + TILE * r + lane_row(lane);
        sums_of_rows[r] = float2(from[0], from[1]);
      }
#endif
      UnitRows unit_rows;
      load_unit_rows<TILES>(unit_rows, x, u * UNIT, lane);
      add_unit<TILES>(sums, now[u], unit_rows, sums_of_rows);
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

// Of rows that do not fill the tile no more tiles are made than hold some, 1, 2 or all.
inline void sum_tile(
    thread Totals& totals,
    threadgroup Piece* memory,
    thread WeightRow (&weights)[OUTPUT_TILES],
    thread Work& work,
    int num_rows,
    int turn,
    uint thread_index) {
  if (num_rows > 2 * TILE) {
    sum_tiles<ROW_TILES>(totals, memory, weights, work, thread_index);
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
