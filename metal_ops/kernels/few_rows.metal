// A threadgroup's sums where there are few rows, or many of few outputs: its SIMD-groups share OUTPUTS outputs of each
// weight and ROWS rows, and have a chunk of K each. Few rows have few tiles, and wait for their weights: so they have
// as many loads in flight as the weight has chunks. Of one row 7 of 8 columns are idle, which weights read from memory
// hide as long as a chip has arithmetic to spare: reckoned, not measured, an M4 Max has for bf16 and 8 bits, and nearly
// for 4. On a Mac that is what to measure first.
//
// A threadgroup takes TURNS times OUTPUTS outputs, one after the other, with the same rows: what it has made of these
// it keeps, if a SIMD-group's chunk is one batch of units, and it loads weights a batch ahead. For 4 units of 64 kept
// in bf16 that is 40 registers a thread, 24 of weights in 4 bits, and 8 of sums.
//
// A lane brings values of the rows that it holds pointers to, straight from memory. What the SIMD-groups made is added
// after a barrier; a thread then has every THREADS-th sum of the threadgroup's rows and outputs.
#define OUTPUTS (TILE * WEIGHT_TILES)
#define MEMORY float
#define MEMORY_SIZE (CHUNKS * ROWS * WEIGHTS * OUTPUTS)
#define NUM_POINTERS (ROW_TILES * LANE_ROWS)
#define NUM_TOTALS ((ROWS * OUTPUTS + THREADS - 1) / THREADS)
// Units that are waited for together. More rows leave registers for one.
#if ROW_TILES == 1
#define BATCH 4
#else
#define BATCH 1
#endif
#define KEEPS_ROWS (ROW_TILES == 1 && NUM_UNITS <= CHUNKS * BATCH)

// The scales of a batch lie side by side, where no batch is short of units.
#define IS_EVEN (NUM_UNITS % (CHUNKS * BATCH) == 0)
#define IS_TOGETHER (BITS && BATCH == 4 && IS_EVEN)

// What a lane has of a batch of an output's weights.
struct BatchWeights {
#if IS_TOGETHER
  uint words[BATCH][LANE_WORDS];
  Four scales, biases;
#else
  UnitWeights units[BATCH];
#endif
};
// What a lane has of a batch of rows, and what these add up to over each unit.
struct BatchRows {
  UnitRows units[BATCH];
  RowSums sums[BATCH][ROW_TILES];
};
struct Work {
  device const T* at[NUM_POINTERS];
  BatchWeights next[OUTPUT_TILES];
  BatchRows kept;
};
struct Totals {
  threadgroup float* partial;
};

// Which of the tile's rows a thread's pointer number n is to, and where in the row it begins.
inline int pointed_row(int n, uint thread_index) {
  return TILE * (n / LANE_ROWS) + loaded_row(thread_index % 32) + n % LANE_ROWS;
}
inline int pointed_at(int n, uint thread_index) { return 0; }

// The lane's output of a tile of a weight, among the threadgroup's.
inline int tile_output(int tile, uint thread_index) { return TILE * tile + lane_output(thread_index % 32); }

// Of `left` units that are left, the number u of a batch: those beyond the last are it again, and are not added.
inline int batch_unit(int u, int left) {
#if IS_EVEN
  return u;
#else
  return min(u, left - 1);
#endif
}

inline void load_batch(
    thread BatchWeights (&loaded)[OUTPUT_TILES],
    thread WeightRow (&weights)[OUTPUT_TILES],
    int first,
    int left,
    uint lane) {
  UNROLL for (int o = 0; o < OUTPUT_TILES; o++) {
    const WeightRow row = row_from(weights[o], first, lane);
#if IS_TOGETHER
    UNROLL for (int u = 0; u < BATCH; u++) load_lane_words(loaded[o].words[u], row, u);
    loaded[o].scales = load_four(row.scales);
    loaded[o].biases = load_four(row.biases);
#else
    UNROLL for (int u = 0; u < BATCH; u++) load_unit(loaded[o].units[u], row, batch_unit(u, left));
#endif
  }
}

inline UnitWeights unit_of(thread const BatchWeights& batch, int u) {
#if IS_TOGETHER
  UnitWeights unit;
  UNROLL for (int i = 0; i < LANE_WORDS; i++) unit.words[i] = batch.words[u][i];
  unit.scale = value_of(batch.scales, u);
  unit.bias = value_of(batch.biases, u);
  return unit;
#else
  return batch.units[u];
#endif
}

// The batch from unit i on or, past the last of `count`, the next turn's first one.
inline void load_next(
    thread BatchWeights (&next)[OUTPUT_TILES],
    thread WeightRow (&weights)[OUTPUT_TILES],
    int first,
    int i,
    int count,
    int turn,
    uint lane) {
  if (i < count) {
    load_batch(next, weights, first + i, count - i, lane);
  } else if (turn + 1 < TURNS) {
    UNROLL for (int o = 0; o < OUTPUT_TILES; o++) weights[o] = row_after(weights[o], OUTPUTS);
    load_batch(next, weights, first, count, lane);
  }
}

inline void load_rows_of(
    thread BatchRows& rows, thread LaneRows (&x)[ROW_TILES], int first, int left, uint lane) {
  UNROLL for (int u = 0; u < BATCH; u++) {
    load_unit_rows<ROW_TILES>(rows.units[u], x, (first + batch_unit(u, left)) * UNIT, lane);
  }
}

inline void deal_batch(thread BatchRows& rows, thread const Ones& ones) {
  UNROLL for (int u = 0; u < BATCH; u++) {
    UNROLL for (int r = 0; r < ROW_TILES; r++) {
      rows.sums[u][r] = float2(0.0f);
      UNROLL for (int b = 0; b < UNIT / BLOCK; b++) {
        deal_rows(rows.units[u][b][r]);
#if BITS
        add_rows(rows.sums[u][r], rows.units[u][b][r], ones);
#endif
      }
    }
  }
}

// The sums of a turn. weights: of the lane's output of each tile, in the first turn; those of the next one after it.
inline void sum_tile(
    thread Totals& totals,
    threadgroup float* memory,
    thread WeightRow (&weights)[OUTPUT_TILES],
    thread Work& work,
    int num_rows,
    int turn,
    uint thread_index) {
  const uint lane = thread_index % 32;
  const int chunk = thread_index / 32, first = chunk_start(chunk);
#if NUM_UNITS % CHUNKS == 0
  const int count = NUM_UNITS / CHUNKS;
#else
  const int count = chunk_start(chunk + 1) - first;
#endif
  LaneRows x[ROW_TILES];
  UNROLL for (int n = 0; n < NUM_POINTERS; n++) x[n / LANE_ROWS].at[n % LANE_ROWS] = work.at[n];
  const Ones ones = make_ones();
  Sums sums[ROW_TILES][OUTPUT_TILES];
  clear<ROW_TILES>(sums);
  if (turn == 0) {
    load_batch(work.next, weights, first, count, lane);
    wait_for_last_launch();
  }
  for (int i = 0; i < count; i += BATCH) {
    BatchWeights now[OUTPUT_TILES];
    UNROLL for (int o = 0; o < OUTPUT_TILES; o++) now[o] = work.next[o];
    if (!KEEPS_ROWS || turn == 0) load_rows_of(work.kept, x, first + i, count - i, lane);
    // One batch alone comes while its sums are added, and needs no registers of its own.
    if (!KEEPS_ROWS) load_next(work.next, weights, first, i + BATCH, count, turn, lane);
    if (!hold_loads(chunk)) break;
    if (!KEEPS_ROWS || turn == 0) deal_batch(work.kept, ones);
    UNROLL for (int u = 0; u < BATCH; u++) {
      if (i + u >= count) break;
      UnitWeights unit[OUTPUT_TILES];
      UNROLL for (int o = 0; o < OUTPUT_TILES; o++) unit[o] = unit_of(now[o], u);
      UnitBlocks blocks;
      set_blocks(blocks, unit);
      add_unit<ROW_TILES>(sums, unit, blocks, work.kept.units[u], work.kept.sums[u]);
    }
    if (KEEPS_ROWS) load_next(work.next, weights, first, i + BATCH, count, turn, lane);
  }
  totals.partial = memory;
  // The sums of the turn before have been added.
  if (turn > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (int o = 0; o < OUTPUT_TILES; o++) {
    UNROLL for (int r = 0; r < ROW_TILES; r++) {
      UNROLL for (int i = 0; i < 2; i++) {
        const int row = TILE * r + lane_row(lane) + i;
        memory[(chunk * ROWS + row) * (WEIGHTS * OUTPUTS) + TILE * o + lane_output(lane)] =
            sums[r][o].thread_elements()[i];
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Where a thread's sum number n belongs in the threadgroup's rows and outputs; beyond the rows if it has none.
inline Place place_of(int n, uint thread_index) {
  const int element = n * THREADS + int(thread_index);
  Place place;
  place.row = element / OUTPUTS;
  place.output = element % OUTPUTS;
  return place;
}

// A sum with one of the weights: of all chunks, in order.
inline float total_of(thread Totals& totals, int n, int weight, uint thread_index) {
  const Place place = place_of(n, thread_index);
  const int element = place.row * (WEIGHTS * OUTPUTS) + weight * OUTPUTS + place.output;
  float sum = 0;
  for (int chunk = 0; chunk < CHUNKS; chunk++) sum += totals.partial[chunk * (ROWS * WEIGHTS * OUTPUTS) + element];
  return sum;
}
