// out[m][n] = sum_k x[m][k] * (scale * q[n][k] + bias), scale and bias of each 64 weights; 8 weights of 4 bits in a
// word, the lowest first. Grid (N / 8, M), threads (32, 2): a SIMD-group makes 4 outputs. K is a multiple of 512.
#include <metal_stdlib>
using namespace metal;

constant int OUTPUTS = 4;
constant int VALUES = 16;

template <typename T>
[[kernel, max_total_threads_per_threadgroup(64)]] void matvec_4bit(
    device T* out [[buffer(0)]],
    device const T* x [[buffer(1)]],
    device const uint* weight [[buffer(2)]],
    device const T* scales [[buffer(3)]],
    device const T* biases [[buffer(4)]],
    constant int& K [[buffer(5)]],
    constant int& N [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const int first = (int(group.x) * 2 + int(simdgroup)) * OUTPUTS;
  x += int(group.y) * K;
  float sums[OUTPUTS] = {0, 0, 0, 0};
  for (int k = int(lane) * VALUES; k < K; k += 32 * VALUES) {
    float values[VALUES];
    float total = 0;
    for (int i = 0; i < VALUES; i += 4) {
      vec<T, 4> loaded = *(device const vec<T, 4>*)(x + k + i);
      for (int j = 0; j < 4; j++) {
        values[i + j] = float(loaded[j]);
        total += values[i + j];
      }
    }
    for (int r = 0; r < OUTPUTS; r++) {
      uint2 packed = *(device const uint2*)(weight + (first + r) * (K / 8) + k / 8);
      float product = 0;
      for (int i = 0; i < 8; i++) {
        product += values[i] * float((packed.x >> (4 * i)) & 15u);
        product += values[8 + i] * float((packed.y >> (4 * i)) & 15u);
      }
      const int of_64 = (first + r) * (K / 64) + k / 64;
      sums[r] += float(scales[of_64]) * product + float(biases[of_64]) * total;
    }
  }
  for (int r = 0; r < OUTPUTS; r++) {
    float sum = simd_sum(sums[r]);
    if (lane == 0 && first + r < N) out[int(group.y) * N + first + r] = T(sum);
  }
}

template [[host_name("matvec_4bit_f32")]] [[kernel]] decltype(matvec_4bit<float>) matvec_4bit<float>;
template [[host_name("matvec_4bit_f16")]] [[kernel]] decltype(matvec_4bit<half>) matvec_4bit<half>;
template [[host_name("matvec_4bit_bf16")]] [[kernel]] decltype(matvec_4bit<bfloat>) matvec_4bit<bfloat>;
