// Vector constructors: float4(a, b.xy, c). `float4(` is a function-like macro, so that a plain float4 stays the type.
#pragma once

namespace metal {
template <class A>
constexpr int msl_num_components = msl_vector<A>::width ? msl_vector<A>::width : 1;

template <class V, class A>
MSL_INLINE void msl_append(V& made, int& count, A part) {
  using T = typename msl_vector<V>::element;
  if constexpr (msl_vector<A>::width == 0) {
    made[count++] = (T)part;
  } else {
    for (int i = 0; i < msl_vector<A>::width; i++) made[count++] = (T)part[i];
  }
}

template <class V, class... A>
MSL_INLINE V msl_make(A... parts) {
  using T = typename msl_vector<V>::element;
  constexpr int width = msl_vector<V>::width;
  V made = {};
  if constexpr (sizeof...(A) == 1 && (0 + ... + msl_vector<A>::width) == 0) {
    for (int i = 0; i < width; i++) made[i] = (T)(parts, ...);
  } else if constexpr (sizeof...(A) != 0) {
    static_assert((0 + ... + msl_num_components<A>) == width, "wrong number of components in a vector constructor");
    int count = 0;
    (msl_append(made, count, parts), ...);
  }
  return made;
}
}  // namespace metal

#define MSL_CONSTRUCTOR(V) \
  template <class... A> \
  MSL_INLINE V msl_make_##V(A... parts) { \
    return metal::msl_make<V>(parts...); \
  } \
  namespace metal { \
  using ::V; \
  using ::msl_make_##V; \
  }
#define MSL_CONSTRUCTORS(T) MSL_CONSTRUCTOR(T##2) MSL_CONSTRUCTOR(T##3) MSL_CONSTRUCTOR(T##4)
MSL_CONSTRUCTORS(char)
MSL_CONSTRUCTORS(uchar)
MSL_CONSTRUCTORS(short)
MSL_CONSTRUCTORS(ushort)
MSL_CONSTRUCTORS(int)
MSL_CONSTRUCTORS(uint)
MSL_CONSTRUCTORS(long)
MSL_CONSTRUCTORS(ulong)
MSL_CONSTRUCTORS(half)
MSL_CONSTRUCTORS(bfloat)
MSL_CONSTRUCTORS(float)
MSL_CONSTRUCTORS(bool)

#define char2(...) msl_make_char2(__VA_ARGS__)
#define char3(...) msl_make_char3(__VA_ARGS__)
#define char4(...) msl_make_char4(__VA_ARGS__)
#define uchar2(...) msl_make_uchar2(__VA_ARGS__)
#define uchar3(...) msl_make_uchar3(__VA_ARGS__)
#define uchar4(...) msl_make_uchar4(__VA_ARGS__)
#define short2(...) msl_make_short2(__VA_ARGS__)
#define short3(...) msl_make_short3(__VA_ARGS__)
#define short4(...) msl_make_short4(__VA_ARGS__)
#define ushort2(...) msl_make_ushort2(__VA_ARGS__)
#define ushort3(...) msl_make_ushort3(__VA_ARGS__)
#define ushort4(...) msl_make_ushort4(__VA_ARGS__)
#define int2(...) msl_make_int2(__VA_ARGS__)
#define int3(...) msl_make_int3(__VA_ARGS__)
#define int4(...) msl_make_int4(__VA_ARGS__)
#define uint2(...) msl_make_uint2(__VA_ARGS__)
#define uint3(...) msl_make_uint3(__VA_ARGS__)
#define uint4(...) msl_make_uint4(__VA_ARGS__)
#define long2(...) msl_make_long2(__VA_ARGS__)
#define long3(...) msl_make_long3(__VA_ARGS__)
#define long4(...) msl_make_long4(__VA_ARGS__)
#define ulong2(...) msl_make_ulong2(__VA_ARGS__)
#define ulong3(...) msl_make_ulong3(__VA_ARGS__)
#define ulong4(...) msl_make_ulong4(__VA_ARGS__)
#define half2(...) msl_make_half2(__VA_ARGS__)
#define half3(...) msl_make_half3(__VA_ARGS__)
#define half4(...) msl_make_half4(__VA_ARGS__)
#define bfloat2(...) msl_make_bfloat2(__VA_ARGS__)
#define bfloat3(...) msl_make_bfloat3(__VA_ARGS__)
#define bfloat4(...) msl_make_bfloat4(__VA_ARGS__)
#define float2(...) msl_make_float2(__VA_ARGS__)
#define float3(...) msl_make_float3(__VA_ARGS__)
#define float4(...) msl_make_float4(__VA_ARGS__)
#define bool2(...) msl_make_bool2(__VA_ARGS__)
#define bool3(...) msl_make_bool3(__VA_ARGS__)
#define bool4(...) msl_make_bool4(__VA_ARGS__)
