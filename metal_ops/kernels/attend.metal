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
// A pair is a column of every simdgroup matrix, and places.metal tells which columns a lane has:
//   scores (key, pair) = keys (key, d) x queries (d, pair)
//   sums (d, pair)     = values (d, key) x weights (key, pair)
// The scores of a lane are thus its weights where they stand, and its maximum is that of its sums. Column c of step j
// multiplies dimension c / 2 * 2 * STEPS + 2 * j + c % 2, and row c of matrix s of the sums is dimension
// c * STEPS + s: a lane's loads of a key and of a value are then of consecutive numbers, and none is to be transposed.
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

// Rows of a segment. first, last: the last positions that the first and the last of them see. num_rows is 0 where there
// is no such tile.
struct Tile {
  int first_row, num_rows, base, first, last;
};
struct Queries {
  Operand steps[STEPS][PAIR_TILES];
  int positions[PAIR_TILES][PLACE_COLUMNS];
};
// Sums over keys: those of values, not divided yet. total: the lane's part of the weights' sum.
struct Mixed {
  Sums sums[STEPS][PAIR_TILES];
  float highest[PAIR_TILES][PLACE_COLUMNS], total[PAIR_TILES][PLACE_COLUMNS];
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
      tile.first = row_position(table, tile.first_row);
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

inline void load_queries(
    thread Queries& queries,
    thread const Tile& tile,
    device const T* q,
    device const int* table,
    int kv_head,
    uint lane) {
  UNROLL for (int p = 0; p < PAIR_TILES; p++) {
    UNROLL for (int i = 0; i < 2; i++) {
      const int pair = TILE * p + place_column(lane, i), row = pair_row(tile, pair), c = place_row(lane, i);
      const int head = kv_head * GROUP + pair % GROUP;
      T run[2 * STEPS];
      load_run(run, q + (row * NUM_HEADS + head) * HEAD_DIM + c / 2 * 2 * STEPS);
      UNROLL for (int j = 0; j < STEPS; j++) {
        queries.steps[j][p].thread_elements()[i] = c % 2 ? run[2 * j + 1] : run[2 * j];
      }
      queries.positions[p][i % PLACE_COLUMNS] = row_position(table, row);
    }
  }
}

inline void clear_tiles(thread Sums (&sums)[PAIR_TILES]) {
  UNROLL for (int p = 0; p < PAIR_TILES; p++) sums[p] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}
inline void clear(thread Mixed& mixed) {
  UNROLL for (int s = 0; s < STEPS; s++) clear_tiles(mixed.sums[s]);
  UNROLL for (int p = 0; p < PAIR_TILES; p++) {
    UNROLL for (int n = 0; n < PLACE_COLUMNS; n++) {
      mixed.highest[p][n] = LOWEST;
      mixed.total[p][n] = 0;
    }
  }
}

// Of all lanes that hold the same pairs.
inline float max_of_pair(float x) {
  UNROLL for (int i = 0; i < PLACE_BITS; i++) x = max(x, simd_shuffle_xor(x, place_bit(i)));
  return x;
}
inline float sum_of_pair(float x) {
  UNROLL for (int i = 0; i < PLACE_BITS; i++) x += simd_shuffle_xor(x, place_bit(i));
  return x;
}

inline int key_until(bool sees_all, int key, int last) { return sees_all ? key : min(key, last); }

// The weight of a score beside the highest, or of what was weighed by another.
inline float weight_of(float score, float highest) { return fast::exp2((score - highest) * SCALE); }

// Adds a chunk, and asks for the next one. keys, values: from the stream's first on, of the kv head. Unless all rows
// see the whole chunk, keys past the tile's last read that one, which is written, and weigh nothing. 64 bits, because a
// pool may hold more than 2^31 numbers.
template <bool SEES_ALL>
inline void mix_chunk(
    thread Mixed& mixed,
    thread Queries& queries,
    device const T* keys,
    device const T* values,
    int chunk,
    int next_split,
    int last,
    uint lane) {
  const int first_key = chunk * KEY_CHUNK;
  const int next = chunk + SPLITS <= last / KEY_CHUNK ? chunk + SPLITS : next_split;
  // The first 128 bytes of a lane's key and value.
  const long ahead = long(min(next * KEY_CHUNK + int(lane), last)) * (NUM_KV_HEADS * HEAD_DIM);
  load_to_cache(keys + ahead);
  load_to_cache(values + ahead);
  Sums scores[KEY_TILES][PAIR_TILES];
  UNROLL for (int k = 0; k < KEY_TILES; k++) {
    const int key = key_until(SEES_ALL, first_key + TILE * k + lane_output(lane), last);
    T run[2 * STEPS];
    load_run(run, keys + long(key) * (NUM_KV_HEADS * HEAD_DIM) + lane_row(lane) * STEPS);
    clear_tiles(scores[k]);
    UNROLL for (int j = 0; j < STEPS; j += 2) {
      Operand steps[2];
      UNROLL for (int h = 0; h < 2; h++) {
        UNROLL for (int i = 0; i < 2; i++) steps[h].thread_elements()[i] = run[2 * (j + h) + i];
      }
      multiply_two(scores[k], steps, queries.steps[j], queries.steps[j + 1]);
    }
  }

  Operand weights[KEY_TILES][PAIR_TILES];
  UNROLL for (int p = 0; p < PAIR_TILES; p++) {
    float seen[KEY_TILES][2], highest[PLACE_COLUMNS], rescale[PLACE_COLUMNS], total[PLACE_COLUMNS];
    UNROLL for (int n = 0; n < PLACE_COLUMNS; n++) highest[n] = mixed.highest[p][n];
    UNROLL for (int k = 0; k < KEY_TILES; k++) {
      UNROLL for (int i = 0; i < 2; i++) {
        const int key = first_key + TILE * k + place_row(lane, i), n = i % PLACE_COLUMNS;
        seen[k][i] = SEES_ALL || key <= queries.positions[p][n] ? scores[k][p].thread_elements()[i] : LOWEST;
        highest[n] = max(highest[n], seen[k][i]);
      }
    }
    UNROLL for (int n = 0; n < PLACE_COLUMNS; n++) {
      highest[n] = max_of_pair(highest[n]);
      rescale[n] = weight_of(mixed.highest[p][n], highest[n]);
      mixed.highest[p][n] = highest[n];
      total[n] = 0;
    }
    UNROLL for (int k = 0; k < KEY_TILES; k++) {
      UNROLL for (int i = 0; i < 2; i++) {
        const T weight = T(weight_of(seen[k][i], highest[i % PLACE_COLUMNS]));
        weights[k][p].thread_elements()[i] = weight;
        total[i % PLACE_COLUMNS] += float(weight);
      }
    }
    UNROLL for (int n = 0; n < PLACE_COLUMNS; n++) {
      mixed.total[p][n] = fma(mixed.total[p][n], rescale[n], total[n]);
    }
    UNROLL for (int s = 0; s < STEPS; s++) {
      UNROLL for (int i = 0; i < 2; i++) mixed.sums[s][p].thread_elements()[i] *= rescale[i % PLACE_COLUMNS];
    }
  }

  UNROLL for (int k = 0; k < KEY_TILES; k += 2) {
    T runs[2][2][STEPS];
    UNROLL for (int h = 0; h < 2; h++) {
      UNROLL for (int i = 0; i < 2; i++) {
        const int key = key_until(SEES_ALL, first_key + TILE * (k + h) + lane_row(lane) + i, last);
        load_run(runs[h][i], values + long(key) * (NUM_KV_HEADS * HEAD_DIM) + lane_output(lane) * STEPS);
      }
    }
    UNROLL for (int s = 0; s < STEPS; s++) {
      Operand both[2];
      UNROLL for (int h = 0; h < 2; h++) {
        UNROLL for (int i = 0; i < 2; i++) both[h].thread_elements()[i] = runs[h][i][s];
      }
      multiply_two(mixed.sums[s], both, weights[k], weights[k + 1]);
    }
  }
}

// The sums over a split of the tile's keys. next_split: what is walked after it, or it again.
inline void mix_split(
    thread Mixed& mixed,
    thread Queries& queries,
    device const T* keys,
    device const T* values,
    int split,
    int next_split,
    thread const Tile& tile,
    uint lane) {
  clear(mixed);
  int chunk = split;
  for (; (chunk + 1) * KEY_CHUNK <= tile.first + 1; chunk += SPLITS) {
    mix_chunk<true>(mixed, queries, keys, values, chunk, next_split, tile.last, lane);
  }
  for (; chunk <= tile.last / KEY_CHUNK; chunk += SPLITS) {
    mix_chunk<false>(mixed, queries, keys, values, chunk, next_split, tile.last, lane);
  }
  UNROLL for (int p = 0; p < PAIR_TILES; p++) {
    UNROLL for (int n = 0; n < PLACE_COLUMNS; n++) mixed.total[p][n] = sum_of_pair(mixed.total[p][n]);
  }
}

// How the sums of a split join those of the splits before it, by their highest scores.
inline Fold fold_of(float whole, float part) {
  Fold fold;
  fold.highest = max(whole, part);
  fold.whole = weight_of(whole, fold.highest);
  fold.part = weight_of(part, fold.highest);
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
