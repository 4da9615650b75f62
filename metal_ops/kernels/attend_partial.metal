// attend_partial: the sums of each split of the keys, for few rows. attend.metal says how they are made.
//
//   mixed[t, h, split] (D), totals[t, h, split] = (highest score, sum of weights)
//
// Grid: kv heads x blocks of SIMDGROUPS splits x tiles; a SIMD-group a split. Called once an attention layer by
// metal_ops/attention.py, before attend_merge. A round of few rows has few tiles, and its keys are all it reads: the
// splits bring enough loads in flight, as many at every length of a context. SPLITS is a constant, so that what is
// written is bounded, and it is the same for every round, so that a row's order of sums is. Tiles that the round does
// not have, and splits beyond a tile's keys, return at once.
//
// Moves the keys and values of a segment once for each of its tiles, 2 KEY_CHUNK HEAD_DIM numbers a chunk, and writes
// HEAD_DIM + 2 fp32 numbers for each split of a pair. 2 PAIR_TILES STEPS registers of sums a thread, and half as many
// for queries in 2 bytes: 48 for D = 64 and 16 pairs.
#define SIMDGROUPS (THREADS / 32)

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void attend_partial(
    device float* mixed,
    device float* totals,
    device const T* q,
    device const T* keys,
    device const T* values,
    device const int* table,
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const int kv_head = group.x, split = int(group.y) * SIMDGROUPS + int(simdgroup);
  const Tile tile = find_tile(table, group.z);
  if (tile.num_rows == 0 || split > tile.last / KEY_CHUNK) return;
  wait_for_last_launch();
  const long place = (long(tile.base) * NUM_KV_HEADS + kv_head) * HEAD_DIM;
  Queries queries;
  Mixed sums;
  load_queries(queries, tile, q, table, kv_head, lane);
  mix_split(sums, queries, keys + place, values + place, split, split, tile, lane);

  UNROLL for (int p = 0; p < PAIR_TILES; p++) {
    UNROLL for (int i = 0; i < 2; i++) {
      const int pair = TILE * p + place_column(lane, i);
      if (!is_pair(tile, pair)) continue;
      const int head = kv_head * GROUP + pair % GROUP;
      const int part = (pair_row(tile, pair) * NUM_HEADS + head) * SPLITS + split;
      float run[STEPS];
      UNROLL for (int s = 0; s < STEPS; s++) run[s] = sums.sums[s][p].thread_elements()[i];
      store_run(mixed + part * HEAD_DIM + place_row(lane, i) * STEPS, run);
      if (place_row(lane, i) == 0) {
        totals[2 * part] = sums.highest[p][i % PLACE_COLUMNS];
        totals[2 * part + 1] = sums.total[p][i % PLACE_COLUMNS];
      }
    }
  }
}
