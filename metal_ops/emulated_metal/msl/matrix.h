// simdgroup_matrix<T, 8, 8>: a lane holds the elements (row, column) and (row, column + 1), as on Apple's GPUs (the
// layout that MLX's BaseMMAFrag::get_coord and tinygrad's tc.metal state).
#pragma once

namespace metal {
MSL_INLINE uint msl_matrix_row(uint lane) { return (lane / 4 & 4) + lane / 2 % 4; }
MSL_INLINE uint msl_matrix_column(uint lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }

template <class T, int rows, int columns>
struct simdgroup_matrix {
  static_assert(rows == 8 && columns == 8, "only simdgroup matrices of 8 x 8 exist");
  static_assert(__is_same(T, float) || __is_same(T, half) || __is_same(T, bfloat), "no simdgroup matrix of this type");
  T elements[2];

  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    uint row = msl_matrix_row(emu_lane()), column = msl_matrix_column(emu_lane());
    elements[0] = row == column ? diagonal : (T)0.0f;
    elements[1] = row == column + 1 ? diagonal : (T)0.0f;
  }
  // One by one: Apple's is a wider vector, of which these are the first, and not assigned as a whole.
  thread T (&thread_elements())[2] { return elements; }
  const thread T (&thread_elements() const)[2] { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int rows, int columns>
MSL_LIBRARY simdgroup_matrix<T, rows, columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, rows, columns> filled;
  for (int i = 0; i < 2; i++) filled.elements[i] = value;
  return filled;
}

MSL_LIBRARY emu_exchange* msl_all_lanes(const char* op, const void* value, uint size, const char* file, int line,
                                        int column) {
  emu_exchange* exchange = emu_collective(op, value, size, file, line, column);
  if (exchange->mask != ~0u) emu_fail("simdgroup_matrix in a SIMD-group of less than 32 threads", file, line);
  return exchange;
}
MSL_INLINE void msl_meet(const char* op, const char* file, int line, int column) {
#ifdef MSL_CHECKED
  uint nothing = 0;
  msl_all_lanes(op, &nothing, sizeof nothing, file, line, column);
#endif
}
MSL_INLINE long msl_matrix_offset(uint i, ulong stride, ulong2 origin, bool transposed) {
  ulong row = msl_matrix_row(emu_lane()), column = msl_matrix_column(emu_lane()) + i;
  return transposed ? (origin.y + column) * stride + origin.x + row : (origin.y + row) * stride + origin.x + column;
}
#define MSL_LOAD_AND_STORE(SPACE) \
  template <class T> \
  MSL_LIBRARY void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& to, const SPACE T* from, ulong stride = 8, \
                                  ulong2 origin = {0, 0}, bool transposed = false, MSL_SITE) { \
    msl_meet("simdgroup_load", file, line, column); \
    for (uint i = 0; i < 2; i++) { \
      const SPACE T* element = from + msl_matrix_offset(i, stride, origin, transposed); \
      MSL_TOUCH(element, EMU_READ); \
      to.elements[i] = *element; \
    } \
  } \
  template <class T> \
  MSL_LIBRARY void simdgroup_store(simdgroup_matrix<T, 8, 8> from, SPACE T* to, ulong stride = 8, \
                                   ulong2 origin = {0, 0}, bool transposed = false, MSL_SITE) { \
    msl_meet("simdgroup_store", file, line, column); \
    for (uint i = 0; i < 2; i++) { \
      SPACE T* element = to + msl_matrix_offset(i, stride, origin, transposed); \
      MSL_TOUCH(element, EMU_WRITE); \
      *element = from.elements[i]; \
    } \
  }
#ifdef MSL_CHECKED
#define MSL_TOUCH(pointer, kind) emu_touch((const void*)(uintptr_t)(pointer), sizeof(*(pointer)), kind, file, line)
#else
#define MSL_TOUCH(pointer, kind)
#endif
MSL_LOAD_AND_STORE(device)
#ifdef MSL_STRICT
MSL_LOAD_AND_STORE(threadgroup)
#endif

// d = a * b + c, with sums of float. The product is made once, by the first lane that goes on.
template <class D, class A, class B, class C>
MSL_LIBRARY void simdgroup_multiply_accumulate(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                               simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c, MSL_SITE) {
  float given[4] = {(float)a.elements[0], (float)a.elements[1], (float)b.elements[0], (float)b.elements[1]};
  emu_exchange* exchange = msl_all_lanes("simdgroup_multiply_accumulate", given, sizeof given, file, line, column);
  float* product = (float*)exchange->result;
  if (!exchange->has_result) {
    using row_of_8 = float __attribute__((ext_vector_type(8)));
    float left[8][8];
    row_of_8 right[8];
    for (uint lane = 0; lane < 32; lane++) {
      const float* slot = (const float*)(exchange->slots + 16 * lane);
      uint row = msl_matrix_row(lane), column = msl_matrix_column(lane);
      left[row][column] = slot[0];
      left[row][column + 1] = slot[1];
      right[row][column] = slot[2];
      right[row][column + 1] = slot[3];
    }
    for (int row = 0; row < 8; row++) {
      row_of_8 sum = left[row][0] * right[0];
      for (int k = 1; k < 8; k++) sum += left[row][k] * right[k];
      __builtin_memcpy(product + 8 * row, &sum, sizeof sum);
    }
    exchange->has_result = 1;
  }
  product += 8 * msl_matrix_row(exchange->lane) + msl_matrix_column(exchange->lane);
  for (int i = 0; i < 2; i++) d.elements[i] = (D)((float)c.elements[i] + product[i]);
}
template <class D, class A, class B>
MSL_LIBRARY void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                    simdgroup_matrix<B, 8, 8> b, MSL_SITE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>((D)0.0f), file, line, column);
}
}  // namespace metal
