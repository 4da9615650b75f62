// One new row's attention over its keys, which are split into chunks: a partial result a chunk, then their merge.
// q (H, 64), k and v (KVH, length, 64) of half; num_keys are valid.
#include <metal_stdlib>
using namespace metal;

#define WIDTH 64
#define NUM_SIMDGROUPS 4

struct Sizes {
  int num_keys, chunk, length, group;
  float scale;
};

// partial (H, S, 64) and max_and_sum (H, S, 2) of float. Grid (H, S), 128 threads: the SIMD-groups take keys in turn.
kernel void attention_partial(
    device float* partial [[buffer(0)]],
    device float* max_and_sum [[buffer(1)]],
    device const half* q [[buffer(2)]],
    device const half* k [[buffer(3)]],
    device const half* v [[buffer(4)]],
    constant Sizes& sizes [[buffer(5)]],
    uint3 position [[threadgroup_position_in_grid]],
    uint3 grid [[threadgroups_per_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float values[NUM_SIMDGROUPS][WIDTH];
  threadgroup float maxima[NUM_SIMDGROUPS], sums[NUM_SIMDGROUPS];
  const int head = position.x, chunk = position.y, kv_head = head / sizes.group;
  const int from = chunk * sizes.chunk, to = min(from + sizes.chunk, sizes.num_keys);
  const half2 query_halves = *(device const half2*)(q + head * WIDTH + 2 * lane);
  const float2 query = float2(query_halves) * sizes.scale;
  float2 value = float2(0.0f);
  float most = -INFINITY, sum = 0;
  for (int t = from + int(simdgroup); t < to; t += NUM_SIMDGROUPS) {
    device const half2* key_row = (device const half2*)(k + (kv_head * sizes.length + t) * WIDTH);
    device const half2* value_row = (device const half2*)(v + (kv_head * sizes.length + t) * WIDTH);
    const float2 key = float2(key_row[lane]);
    const float score = simd_sum(query.x * key.x + query.y * key.y);
    const float new_most = max(most, score), kept = exp(most - new_most), added = exp(score - new_most);
    value = value * kept + float2(value_row[lane]) * added;
    sum = sum * kept + added;
    most = new_most;
  }
  values[simdgroup][2 * lane] = value.x;
  values[simdgroup][2 * lane + 1] = value.y;
  if (lane == 0) {
    maxima[simdgroup] = most;
    sums[simdgroup] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index >= WIDTH) return;
  float group_most = -INFINITY;
  for (int i = 0; i < NUM_SIMDGROUPS; i++) group_most = max(group_most, maxima[i]);
  float result = 0, group_sum = 0;
  for (int i = 0; i < NUM_SIMDGROUPS; i++) {
    const float share = maxima[i] == -INFINITY ? 0.0f : exp(maxima[i] - group_most);
    result += values[i][thread_index] * share;
    group_sum += sums[i] * share;
  }
  const int at = head * int(grid.y) + chunk;
  partial[at * WIDTH + thread_index] = result;
  if (thread_index == 0) {
    max_and_sum[at * 2] = group_most;
    max_and_sum[at * 2 + 1] = group_sum;
  }
}

// out (H, 64) of half. Grid H, 64 threads.
kernel void attention_merge(
    device half* out [[buffer(0)]],
    device const float* partial [[buffer(1)]],
    device const float* max_and_sum [[buffer(2)]],
    constant int& num_chunks [[buffer(3)]],
    uint head [[threadgroup_position_in_grid]],
    uint column [[thread_position_in_threadgroup]]) {
  partial += head * num_chunks * WIDTH;
  max_and_sum += head * num_chunks * 2;
  float most = -INFINITY;
  for (int s = 0; s < num_chunks; s++) most = max(most, max_and_sum[2 * s]);
  float result = 0, sum = 0;
  for (int s = 0; s < num_chunks; s++) {
    const float share = max_and_sum[2 * s] == -INFINITY ? 0.0f : exp(max_and_sum[2 * s] - most);
    result += partial[s * WIDTH + column] * share;
    sum += max_and_sum[2 * s + 1] * share;
  }
  out[head * WIDTH + column] = half(result / sum);
}
