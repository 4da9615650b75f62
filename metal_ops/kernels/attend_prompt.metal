// attend_prompt: attention of many rows. attend.metal says how a tile's sums are made.
//
//   out[t, h] = round(sum_key weight[key] * values[key] / sum_key weight[key])
//
// Grid: kv heads x blocks of SIMDGROUPS tiles; a SIMD-group a tile, which walks all splits in order and folds them as
// attend_merge does: the same bits, and no sums in memory. Called once an attention layer by metal_ops/attention.py.
// A round of many rows has tiles enough; neighbouring ones see the same keys at about the same time, so that a
// threadgroup reads them once, and from the cache after that. Tiles that the round does not have return at once.
//
// Moves q and out once. 4 PAIR_TILES STEPS registers of sums a thread, of the split and of all: 64 for D = 64 and 16
// pairs, and with queries and scores not much more than 100 in all; with 32 pairs, on NVIDIA's GPUs, all 255.
#define SIMDGROUPS (THREADS / 32)

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void attend_prompt(
    device T* out,
    device const T* q,
    device const T* keys,
    device const T* values,
    device const int* table,
    uint2 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const int kv_head = group.x;
  const Tile tile = find_tile(table, int(group.y) * SIMDGROUPS + int(simdgroup));
  if (tile.num_rows == 0) return;
  const long place = (long(tile.base) * NUM_KV_HEADS + kv_head) * HEAD_DIM;
  Queries queries;
  Mixed whole, split_sums;
  load_queries(queries, tile, q, table, kv_head, lane);
  clear(whole);
  for (int split = 0; split < min(SPLITS, tile.last / KEY_CHUNK + 1); split++) {
    mix_split(split_sums, queries, keys + place, values + place, split, split + 1, tile, lane);
    UNROLL for (int p = 0; p < PAIR_TILES; p++) {
      Fold folds[PLACE_COLUMNS];
      UNROLL for (int n = 0; n < PLACE_COLUMNS; n++) {
        folds[n] = fold_of(whole.highest[p][n], split_sums.highest[p][n]);
        whole.highest[p][n] = folds[n].highest;
        whole.total[p][n] = folded(whole.total[p][n], split_sums.total[p][n], folds[n]);
      }
      UNROLL for (int s = 0; s < STEPS; s++) {
        UNROLL for (int i = 0; i < 2; i++) {
          const float before = whole.sums[s][p].thread_elements()[i];
          const float part = split_sums.sums[s][p].thread_elements()[i];
          whole.sums[s][p].thread_elements()[i] = folded(before, part, folds[i % PLACE_COLUMNS]);
        }
      }
    }
  }

  UNROLL for (int p = 0; p < PAIR_TILES; p++) {
    UNROLL for (int i = 0; i < 2; i++) {
      const int pair = TILE * p + place_column(lane, i), row = pair_row(tile, pair), n = i % PLACE_COLUMNS;
      if (!is_pair(tile, pair)) continue;
      const int head = kv_head * GROUP + pair % GROUP;
      T run[STEPS];
      if (queries.positions[p][n] == 0) {
        load_run(run, values + first_place(table, row, kv_head) + place_row(lane, i) * STEPS);
      } else {
        UNROLL for (int s = 0; s < STEPS; s++) run[s] = T(whole.sums[s][p].thread_elements()[i] / whole.total[p][n]);
      }
      store_run(out + (row * NUM_HEADS + head) * HEAD_DIM + place_row(lane, i) * STEPS, run);
    }
  }
}
