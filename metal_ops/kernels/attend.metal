// Attention of a tile of queries over its stream's keys: what attend_partial, attend_merge and attend_prompt share.
//
//   weight[key] = round(exp(scale * (q . keys[key] - highest)))  for key <= the row's position
//   out = sum_key weight[key] * values[key] / sum_key weight[key]
//
// A tile is up to PAIRS pairs of (row, head) that share a kv head: TILE_ROWS rows of one segment by a group of GROUP
// heads, so one read of a key serves them all. One SIMD-group walks a tile's keys by chunks of KEY_CHUNK, counted from
// the stream's first, all in registers: no barrier, no threadgroup memory. Chunk c belongs to split c % SPLITS. A
// split's chunks are taken in order, with a running maximum by which the sums are rescaled; the splits are folded in
// order. That is all that decides a row's bits: no other row, segment, slot or launch has a part in it, and every
// width goes through simdgroup matrices. A chunk that a row does not reach changes
// nothing, but where it is the first of its split: such a split's sums are of no use, and folded with the weight 0.
//
// A pair is a column of every simdgroup matrix, so a lane holds numbers of the pairs lane_row and lane_row + 1 only:
//   scores (key, pair) = keys (key, d) x queries (d, pair)     the lane: key lane_output of a tile of 8
//   sums (d, pair)     = values (d, key) x weights (key, pair)
// The scores of a lane are thus its weights where they stand, and its maximum is that of its sums. Step j multiplies
// the dimensions c * STEPS + j, c = 0 to 7, and matrix s of the sums has them for its rows: a lane's loads of a key,
// of a query and of a value are then of consecutive numbers, and none needs to be transposed.
//
// Scores are not scaled before their highest is taken off; SCALE has log2(e) in it, for exp2. Weights are rounded to T,
// for the sum of the weights too.
//
// NOTE: a key that a row does not see weighs 0 in its sums, and 0 * inf is NaN: a value that is not finite spoils the
// earlier rows of its own tile too, which are rows of the same stream.
#define KEY_TILES (KEY_CHUNK / TILE)
#define PAIRS (TILE * PAIR_TILES)
#define TILE_ROWS (PAIRS / GROUP)
#define STEPS (HEAD_DIM / TILE)
// The score of a key that is not seen: not -inf, which minus itself is NaN.
#define LOWEST -3.0e38f
#if STEPS % 4 == 0
#define WIDE 4
#else
#define WIDE 2
#endif

// Rows of a segment. last: the last position that any of them sees. num_rows is 0 where there is no such tile.
struct Tile {
  int first_row, num_rows, base, last;
};
struct Queries {
  simdgroup_matrix<T, 8, 8> steps[PAIR_TILES][STEPS];
  int positions[PAIR_TILES][2];
};
// Sums over keys: those of values, not divided yet. total: the lane's part of the weights' sum.
struct Mixed {
  Sums sums[PAIR_TILES][STEPS];
  float highest[PAIR_TILES][2], total[PAIR_TILES][2];
};
// What two parts are multiplied with when they become one.
struct Fold {
  float highest, whole, part;
};

inline Tile find_tile(device const int* table, int index) {
  Tile tile;
  tile.num_rows = 0;
  for (int s = 0; s < num_segments(table); s++) {
    const Segment segment = load_segment(table, s);
    const int num_tiles = (segment.num_rows + TILE_ROWS - 1) / TILE_ROWS;
    if (index < num_tiles) {
      tile.first_row = segment.first_row + index * TILE_ROWS;
      tile.num_rows = min(TILE_ROWS, segment.num_rows - index * TILE_ROWS);
      tile.base = segment.base;
      tile.last = row_position(table, tile.first_row + tile.num_rows - 1);
      break;
    }
    index -= num_tiles;
  }
  return tile;
}

// Rows of pairs beyond the tile's are its last: they are computed, and not stored.
inline int pair_row(thread const Tile& tile, int pair) {
  return tile.first_row + min(pair / GROUP, tile.num_rows - 1);
}
inline bool is_pair(thread const Tile& tile, int pair) { return pair < tile.num_rows * GROUP; }

inline void load_run(thread T (&run)[STEPS], device const T* from) {
  UNROLL for (int i = 0; i < STEPS; i += WIDE) {
    const vec<T, WIDE> loaded = *(device const vec<T, WIDE>*)(from + i);
    UNROLL for (int j = 0; j < WIDE; j++) run[i + j] = loaded[j];
  }
}

inline void load_queries(
    thread Queries& queries,
    thread const Tile& tile,
    device const T* q,
    device const int* table,
    int kv_head,
    uint lane) {
  UNROLL for (int p = 0; p < PAIR_TILES; p++) {
    UNROLL for (int i = 0; i < 2; i++) {
      const int pair = TILE * p + lane_row(lane) + i, row = pair_row(tile, pair);
      const int head = kv_head * GROUP + pair % GROUP;
      T run[STEPS];
      load_run(run, q + (row * NUM_HEADS + head) * HEAD_DIM + lane_output(lane) * STEPS);
      UNROLL for (int j = 0; j < STEPS; j++) queries.steps[p][j].thread_elements()[i] = run[j];
      queries.positions[p][i] = row_position(table, row);
    }
  }
}

inline void clear(thread Mixed& mixed) {
  UNROLL for (int p = 0; p < PAIR_TILES; p++) {
    UNROLL for (int s = 0; s < STEPS; s++) mixed.sums[p][s] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    UNROLL for (int i = 0; i < 2; i++) {
      mixed.highest[p][i] = LOWEST;
      mixed.total[p][i] = 0;
    }
  }
}

// Of all lanes that hold the same pairs.
inline float max_of_pair(float x) {
  UNROLL for (int i = 0; i < 3; i++) x = max(x, simd_shuffle_xor(x, column_bit(i)));
  return x;
}
inline float sum_of_pair(float x) {
  UNROLL for (int i = 0; i < 3; i++) x += simd_shuffle_xor(x, column_bit(i));
  return x;
}

// Adds a chunk. keys, values: from the stream's first on, of the kv head. Keys past the tile's last read that one,
// which is written, and weigh nothing. 64 bits, because a pool may hold more than 2^31 numbers.
inline void mix_chunk(
    thread Mixed& mixed,
    thread Queries& queries,
    device const T* keys,
    device const T* values,
    int chunk,
    int last,
    uint lane) {
  const int first_key = chunk * KEY_CHUNK;
  Sums scores[PAIR_TILES][KEY_TILES];
  UNROLL for (int k = 0; k < KEY_TILES; k++) {
    const int key = min(first_key + TILE * k + lane_output(lane), last);
    device const T* from = keys + long(key) * (NUM_KV_HEADS * HEAD_DIM) + lane_row(lane) * STEPS;
    T runs[2][STEPS];
    UNROLL for (int i = 0; i < 2; i++) load_run(runs[i], from + i * STEPS);
    UNROLL for (int p = 0; p < PAIR_TILES; p++) scores[p][k] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    UNROLL for (int j = 0; j < STEPS; j++) {
      simdgroup_matrix<T, 8, 8> step;
      UNROLL for (int i = 0; i < 2; i++) step.thread_elements()[i] = runs[i][j];
      UNROLL for (int p = 0; p < PAIR_TILES; p++) {
        simdgroup_multiply_accumulate(scores[p][k], step, queries.steps[p][j], scores[p][k]);
      }
    }
  }

  simdgroup_matrix<T, 8, 8> weights[PAIR_TILES][KEY_TILES];
  UNROLL for (int p = 0; p < PAIR_TILES; p++) {
    UNROLL for (int i = 0; i < 2; i++) {
      float seen[KEY_TILES], highest = mixed.highest[p][i], total = 0;
      UNROLL for (int k = 0; k < KEY_TILES; k++) {
        const int key = first_key + TILE * k + lane_output(lane);
        seen[k] = key <= queries.positions[p][i] ? scores[p][k].thread_elements()[i] : LOWEST;
        highest = max(highest, seen[k]);
      }
      highest = max_of_pair(highest);
      UNROLL for (int k = 0; k < KEY_TILES; k++) {
        const T weight = T(exp2((seen[k] - highest) * SCALE));
        weights[p][k].thread_elements()[i] = weight;
        total += float(weight);
      }
      const float rescale = exp2((mixed.highest[p][i] - highest) * SCALE);
      UNROLL for (int s = 0; s < STEPS; s++) mixed.sums[p][s].thread_elements()[i] *= rescale;
      mixed.total[p][i] = fma(mixed.total[p][i], rescale, total);
      mixed.highest[p][i] = highest;
    }
  }

  UNROLL for (int k = 0; k < KEY_TILES; k++) {
    T runs[2][STEPS];
    UNROLL for (int i = 0; i < 2; i++) {
      const int key = min(first_key + TILE * k + lane_row(lane) + i, last);
      load_run(runs[i], values + long(key) * (NUM_KV_HEADS * HEAD_DIM) + lane_output(lane) * STEPS);
    }
    UNROLL for (int s = 0; s < STEPS; s++) {
      simdgroup_matrix<T, 8, 8> step;
      UNROLL for (int i = 0; i < 2; i++) step.thread_elements()[i] = runs[i][s];
      UNROLL for (int p = 0; p < PAIR_TILES; p++) {
        simdgroup_multiply_accumulate(mixed.sums[p][s], step, weights[p][k], mixed.sums[p][s]);
      }
    }
  }
}

// The sums over a split of the tile's keys.
inline void mix_split(
    thread Mixed& mixed,
    thread Queries& queries,
    device const T* keys,
    device const T* values,
    int split,
    int last,
    uint lane) {
  clear(mixed);
  for (int chunk = split; chunk <= last / KEY_CHUNK; chunk += SPLITS) {
    mix_chunk(mixed, queries, keys, values, chunk, last, lane);
  }
  UNROLL for (int p = 0; p < PAIR_TILES; p++) {
    UNROLL for (int i = 0; i < 2; i++) mixed.total[p][i] = sum_of_pair(mixed.total[p][i]);
  }
}

// How the sums of a split join those of the splits before it, by their highest scores.
inline Fold fold_of(float whole, float part) {
  Fold fold;
  fold.highest = max(whole, part);
  fold.whole = exp2((whole - fold.highest) * SCALE);
  fold.part = exp2((part - fold.highest) * SCALE);
  return fold;
}
inline float folded(float whole, float part, thread const Fold& fold) {
  return fma(part, fold.part, whole * fold.whole);
}

// Where a row's kv head is kept, at the row's own position 0. A row at position 0 sees that alone, and gets its value:
// so do padding rows, each of which has a base of its own in one segment.
inline long first_place(device const int* table, int row, int kv_head) {
  return (long(row_base(table, row)) * NUM_KV_HEADS + kv_head) * HEAD_DIM;
}
