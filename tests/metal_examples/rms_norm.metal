// out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight. A threadgroup a row, any whole number of SIMD-groups.
#include <metal_stdlib>
using namespace metal;

template <typename T>
[[kernel]] void rms_norm(
    device T* out [[buffer(0)]],
    device const T* x [[buffer(1)]],
    device const T* weight [[buffer(2)]],
    constant int& width [[buffer(3)]],
    constant float& eps [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_position_in_threadgroup]],
    uint num_threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint num_simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[32];
  threadgroup float scale;
  x += row * width;
  out += row * width;
  float sum = 0.0f;
  for (uint i = thread_index; i < uint(width); i += num_threads) {
    sum += float(x[i]) * float(x[i]);
  }
  sum = simd_sum(sum);
  if (lane == 0) partial[simdgroup] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup == 0) {
    sum = simd_sum(lane < num_simdgroups ? partial[lane] : 0.0f);
    if (lane == 0) scale = metal::precise::rsqrt(sum / float(width) + eps);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index; i < uint(width); i += num_threads) {
    out[i] = T(float(x[i]) * scale * float(weight[i]));
  }
}

template [[host_name("rms_norm_f32")]] [[kernel]] decltype(rms_norm<float>) rms_norm<float>;
template [[host_name("rms_norm_f16")]] [[kernel]] decltype(rms_norm<half>) rms_norm<half>;
template [[host_name("rms_norm_bf16")]] [[kernel]] decltype(rms_norm<bfloat>) rms_norm<bfloat>;
