// store_qkv: the norm of query and key heads, RoPE, and the write of keys and values into the streams' extents.
//
//   normed = round(round(x / sqrt(mean(x^2) + EPS)) * weight)         x: a head of q or of k
//   q_out[t, h] = rope(normed, position[t])
//   keys[base[t] + position[t], h] = rope(normed, position[t]),  values[base[t] + position[t], h] = v[t, h]
//
// RoPE turns dimension d with d + HALF: fp32, rounded once. Grid: blocks of SIMDGROUPS heads, those of k after those
// of q x rows; SIMDGROUPS * 32 threads. Called once an attention layer by metal_ops/qk.py, for the rows of all
// streams. One SIMD-group a head: its total needs no barrier, and neighbouring lanes hold neighbouring dimensions, each
// with its partner, so RoPE needs no exchange. The group of a key head copies its value head. Where a row stands and
// where it is kept come from the table, never from its place in the round.
//
// Moves q, k and v in and out once; the weights, and the angles for a row's other heads, come from the cache. 2 PAIRS
// registers of values a thread, 8 at most, so that occupancy is full. The order of a head's total depends on HEAD_DIM
// alone.
#define SIMDGROUPS (THREADS / 32)
#define HALF (HEAD_DIM / 2)
#define PAIRS ((HALF + 31) / 32)

[[kernel, max_total_threads_per_threadgroup(THREADS)]] void store_qkv(
    device T* q_out,
    device T* keys,
    device T* values,
    device const T* q,
    device const T* k,
    device const T* v,
    device const W* q_weight,
    device const W* k_weight,
    device const float* angles,
    device const int* table,
    uint2 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const int block_head = int(group.x) * SIMDGROUPS + int(simdgroup), t = group.y;
  if (block_head >= NUM_HEADS + NUM_KV_HEADS) return;
  const bool is_query = block_head < NUM_HEADS;
  const int head = is_query ? block_head : block_head - NUM_HEADS;
  const int position = row_position(table, t);
  // NOTE: 64 bits, because a pool may hold more than 2^31 numbers.
  const long place = (long(row_base(table, t) + position) * NUM_KV_HEADS + head) * HEAD_DIM;
  wait_for_last_launch();
  device const T* x = is_query ? q + (t * NUM_HEADS + head) * HEAD_DIM : k + (t * NUM_KV_HEADS + head) * HEAD_DIM;
  device const W* weight = is_query ? q_weight : k_weight;
  device T* out = is_query ? q_out + (t * NUM_HEADS + head) * HEAD_DIM : keys + place;
  angles += position * HEAD_DIM;

  float low[PAIRS], high[PAIRS], squares = 0;
  for (int i = 0; i < PAIRS; i++) {
    const int d = i * 32 + int(lane);
    low[i] = d < HALF ? float(x[d]) : 0.0f;
    high[i] = d < HALF ? float(x[d + HALF]) : 0.0f;
    squares = fma(low[i], low[i], squares);
    squares = fma(high[i], high[i], squares);
  }
  const float scale = 1 / sqrt(simd_sum(squares) / HEAD_DIM + EPS);
  for (int i = 0; i < PAIRS; i++) {
    const int d = i * 32 + int(lane);
    if (d >= HALF) break;
    const float normed_low = float(T(float(T(low[i] * scale)) * float(weight[d])));
    const float normed_high = float(T(float(T(high[i] * scale)) * float(weight[d + HALF])));
    const float cosine = angles[d], sine = angles[d + HALF];
    out[d] = T(fma(-normed_high, sine, normed_low * cosine));
    out[d + HALF] = T(fma(normed_low, sine, normed_high * cosine));
  }
  if (is_query) return;
  v += (t * NUM_KV_HEADS + head) * HEAD_DIM;
  for (int d = lane; d < HEAD_DIM; d += 32) values[place + d] = v[d];
}
