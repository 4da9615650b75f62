// attend_merge: a row's attention from the sums of its splits, folded in order as attend_prompt folds them.
//
//   out[t, h] = round(sum_split exp(highest[split] - max) * mixed[t, h, split] / the same sum of total[split])
//
// Grid: blocks of THREADS runs of VALUES dimensions of a row x rows; a thread a run. Called by metal_ops/attention.py
// after attend_partial. Reads only the splits that hold keys of the row, AT_ONCE of them in flight; 16 bytes a lane
// and no exchange between lanes.
#define VALUES 4
#define AT_ONCE 8
#define HEAD_RUNS (HEAD_DIM / VALUES)

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void attend_merge(
    device T* out,
    device const float* mixed,
    device const float* totals,
    device const T* values,
    device const int* table,
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  const int t = group.y, run = int(group.x) * THREADS + int(thread_index);
  if (run >= NUM_HEADS * HEAD_RUNS) return;
  const int head = run / HEAD_RUNS, at = run % HEAD_RUNS * VALUES, position = row_position(table, t);
  const int num_splits = min(SPLITS, position / KEY_CHUNK + 1);
  out += t * NUM_HEADS * HEAD_DIM + run * VALUES;
  mixed += (t * NUM_HEADS + head) * SPLITS * HEAD_DIM + at;
  totals += (t * NUM_HEADS + head) * SPLITS * 2;
  wait_for_last_launch();
  if (position == 0) {
    device const T* value = values + first_place(table, t, head / GROUP) + at;
    *(device vec<T, VALUES>*)out = *(device const vec<T, VALUES>*)value;
    return;
  }

  float4 sum = float4(0.0f);
  float highest = LOWEST, total = 0;
  for (int first = 0; first < num_splits; first += AT_ONCE) {
    float4 part[AT_ONCE];
    float2 weight[AT_ONCE];
    for (int i = 0; i < AT_ONCE; i++) {
      const int split = min(first + i, num_splits - 1);
      part[i] = *(device const float4*)(mixed + split * HEAD_DIM);
      weight[i] = *(device const float2*)(totals + split * 2);
    }
    for (int i = 0; i < AT_ONCE; i++) {
      if (first + i >= num_splits) break;
      const Fold fold = fold_of(highest, weight[i].x);
      highest = fold.highest;
      total = folded(total, weight[i].y, fold);
      for (int j = 0; j < VALUES; j++) sum[j] = folded(sum[j], part[i][j], fold);
    }
  }
  vec<T, VALUES> stored;
  for (int j = 0; j < VALUES; j++) stored[j] = T(sum[j] / total);
  *(device vec<T, VALUES>*)out = stored;
}
