// C[m][n] = sum_k A[m][k] * B[n][k] on simdgroup_matrix: tiles of 32 x 32, 4 SIMD-groups of 16 x 16 each.
// Grid (N / 32, ceil(M / 32)), 128 threads. N and K are multiples of 32.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

#define TILE 32
#define STRIDE 36

template <typename T>
kernel void matmul(
    device T* C [[buffer(0)]],
    device const T* A [[buffer(1)]],
    device const T* B [[buffer(2)]],
    constant int& M [[buffer(3)]],
    constant int& N [[buffer(4)]],
    constant int& K [[buffer(5)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup T a_tile[TILE * STRIDE], b_tile[TILE * STRIDE];
  threadgroup float c_tile[TILE * STRIDE];
  const int first_row = group.y * TILE, first_column = group.x * TILE;
  const int row = (simdgroup / 2) * 16, column = (simdgroup % 2) * 16;
  // Each thread stages 8 values of one row.
  const int staged_row = thread_index / 4, staged_column = (thread_index % 4) * 8;
  simdgroup_matrix<float, 8, 8> sums[2][2];
  for (int i = 0; i < 2; i++) {
    for (int j = 0; j < 2; j++) sums[i][j] = simdgroup_matrix<float, 8, 8>(0.0f);
  }
  for (int k = 0; k < K; k += TILE) {
    for (int i = 0; i < 8; i++) {
      const int at = staged_row * STRIDE + staged_column + i;
      a_tile[at] = first_row + staged_row < M ? A[(first_row + staged_row) * K + k + staged_column + i] : T(0);
      b_tile[at] = B[(first_column + staged_row) * K + k + staged_column + i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int kk = 0; kk < TILE; kk += 8) {
      simdgroup_matrix<T, 8, 8> a[2], b[2];
      for (int i = 0; i < 2; i++) {
        simdgroup_load(a[i], a_tile + (row + 8 * i) * STRIDE + kk, STRIDE);
        simdgroup_load(b[i], b_tile + (column + 8 * i) * STRIDE + kk, STRIDE, ulong2(0, 0), true);
      }
      for (int i = 0; i < 2; i++) {
        for (int j = 0; j < 2; j++) simdgroup_multiply_accumulate(sums[i][j], a[i], b[j], sums[i][j]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int i = 0; i < 2; i++) {
    for (int j = 0; j < 2; j++) simdgroup_store(sums[i][j], c_tile + (row + 8 * i) * STRIDE + column + 8 * j, STRIDE);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (first_row + staged_row >= M) return;
  for (int i = 0; i < 8; i++) {
    const int at = (first_row + staged_row) * N + first_column + staged_column + i;
    C[at] = T(c_tile[staged_row * STRIDE + staged_column + i]);
  }
}

template [[host_name("matmul_f32")]] [[kernel]] decltype(matmul<float>) matmul<float>;
template [[host_name("matmul_f16")]] [[kernel]] decltype(matmul<half>) matmul<half>;
template [[host_name("matmul_bf16")]] [[kernel]] decltype(matmul<bfloat>) matmul<bfloat>;
