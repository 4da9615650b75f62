// The lowest index of each row's largest value; is_bad[0] is set if any value is not finite. A threadgroup a row.
#include <metal_stdlib>
using namespace metal;

constant int NONE = 0x7fffffff;

kernel void argmax(
    device int* out,
    device atomic_uint* is_bad,
    device const float* x,
    constant int& width,
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_position_in_threadgroup]],
    uint num_threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint num_simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float best_values[32];
  threadgroup int best_indexes[32];
  float best = -INFINITY;
  int index = NONE;
  bool is_finite = true;
  for (int i = thread_index; i < width; i += num_threads) {
    const float value = x[row * width + i];
    is_finite &= isfinite(value);
    if (value > best) {
      best = value;
      index = i;
    }
  }
  for (ushort step = 16; step > 0; step >>= 1) {
    const float other = simd_shuffle_xor(best, step);
    const int other_index = simd_shuffle_xor(index, step);
    if (other > best || (other == best && other_index < index)) {
      best = other;
      index = other_index;
    }
  }
  if (!simd_all(is_finite) && lane == 0) atomic_fetch_or_explicit(is_bad, 1u, memory_order_relaxed);
  if (lane == 0) {
    best_values[simdgroup] = best;
    best_indexes[simdgroup] = index;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup != 0) return;
  best = lane < num_simdgroups ? best_values[lane] : -INFINITY;
  index = lane < num_simdgroups ? best_indexes[lane] : NONE;
  const float largest = simd_max(best);
  const int lowest = simd_min(best == largest ? index : NONE);
  if (lane == 0) out[row] = lowest == NONE ? 0 : lowest;
}
