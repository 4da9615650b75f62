// Floating-point functions: of float and half, and vectors of them. None of bfloat, which Metal's library lacks too:
// those overloads are deleted, so that the cast to float has to be written. One overload a type, so that mixed
// arguments are ambiguous, as in Metal.
#pragma once

extern "C" {
float acosf(float);
float acoshf(float);
float asinf(float);
float asinhf(float);
float atanf(float);
float atan2f(float, float);
float atanhf(float);
float cosf(float);
float coshf(float);
float expf(float);
float exp2f(float);
float exp10f(float);
float fmodf(float, float);
float ldexpf(float, int);
float logf(float);
float log2f(float);
float log10f(float);
float powf(float, float);
float roundf(float);
float sinf(float);
float sinhf(float);
float tanf(float);
float tanhf(float);
}

#define MSL_EACH(R, N, EXPRESSION) \
  { \
    R result; \
    for (int i = 0; i < N; i++) result[i] = EXPRESSION; \
    return result; \
  }
#define MSL_MAP1(R, T, N, name) MSL_INLINE R##N name(T##N x) MSL_EACH(R##N, N, name(x[i]))
#define MSL_MAP2(T, N, name) MSL_INLINE T##N name(T##N x, T##N y) MSL_EACH(T##N, N, name(x[i], y[i]))
#define MSL_MAP3(T, N, name) MSL_INLINE T##N name(T##N x, T##N y, T##N z) MSL_EACH(T##N, N, name(x[i], y[i], z[i]))

#define MSL_OF1(R, T, name, EXPRESSION) \
  MSL_INLINE R name(T x) { return (R)(EXPRESSION); } \
  MSL_MAP1(R, T, 2, name) \
  MSL_MAP1(R, T, 3, name) \
  MSL_MAP1(R, T, 4, name)
#define MSL_OF2(T, name, EXPRESSION) \
  MSL_INLINE T name(T x, T y) { return (T)(EXPRESSION); } \
  MSL_MAP2(T, 2, name) \
  MSL_MAP2(T, 3, name) \
  MSL_MAP2(T, 4, name)
#define MSL_OF3(T, name, EXPRESSION) \
  MSL_INLINE T name(T x, T y, T z) { return (T)(EXPRESSION); } \
  MSL_MAP3(T, 2, name) \
  MSL_MAP3(T, 3, name) \
  MSL_MAP3(T, 4, name)

// A half is computed as a float and rounded once.
#define MSL_FUNCTION1(name, EXPRESSION) \
  MSL_OF1(float, float, name, EXPRESSION) \
  MSL_OF1(half, half, name, name((float)x)) \
  float name(bfloat) = delete;
#define MSL_FUNCTION2(name, EXPRESSION) \
  MSL_OF2(float, name, EXPRESSION) \
  MSL_OF2(half, name, name((float)x, (float)y)) \
  float name(bfloat, bfloat) = delete;
#define MSL_FUNCTION3(name, EXPRESSION) \
  MSL_OF3(float, name, EXPRESSION) \
  MSL_OF3(half, name, name((float)x, (float)y, (float)z)) \
  float name(bfloat, bfloat, bfloat) = delete;

#define MSL_FLOAT_FUNCTIONS \
  MSL_FUNCTION1(acos, ::acosf(x)) \
  MSL_FUNCTION1(acosh, ::acoshf(x)) \
  MSL_FUNCTION1(asin, ::asinf(x)) \
  MSL_FUNCTION1(asinh, ::asinhf(x)) \
  MSL_FUNCTION1(atan, ::atanf(x)) \
  MSL_FUNCTION1(atanh, ::atanhf(x)) \
  MSL_FUNCTION1(cos, ::cosf(x)) \
  MSL_FUNCTION1(cosh, ::coshf(x)) \
  MSL_FUNCTION1(exp, ::expf(x)) \
  MSL_FUNCTION1(exp2, ::exp2f(x)) \
  MSL_FUNCTION1(exp10, ::exp10f(x)) \
  MSL_FUNCTION1(log, ::logf(x)) \
  MSL_FUNCTION1(log2, ::log2f(x)) \
  MSL_FUNCTION1(log10, ::log10f(x)) \
  MSL_FUNCTION1(sin, ::sinf(x)) \
  MSL_FUNCTION1(sinh, ::sinhf(x)) \
  MSL_FUNCTION1(tan, ::tanf(x)) \
  MSL_FUNCTION1(tanh, ::tanhf(x)) \
  MSL_FUNCTION1(sqrt, __builtin_sqrtf(x)) \
  MSL_FUNCTION1(rsqrt, 1.0f / __builtin_sqrtf(x)) \
  MSL_FUNCTION1(ceil, __builtin_ceilf(x)) \
  MSL_FUNCTION1(floor, __builtin_floorf(x)) \
  MSL_FUNCTION1(fract, x - __builtin_floorf(x)) \
  MSL_FUNCTION1(rint, __builtin_rintf(x)) \
  MSL_FUNCTION1(round, ::roundf(x)) \
  MSL_FUNCTION1(trunc, __builtin_truncf(x)) \
  MSL_FUNCTION1(fabs, __builtin_fabsf(x)) \
  MSL_FUNCTION1(abs, __builtin_fabsf(x)) \
  MSL_FUNCTION1(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f) \
  MSL_FUNCTION1(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f)) \
  MSL_FUNCTION2(atan2, ::atan2f(x, y)) \
  MSL_FUNCTION2(copysign, __builtin_copysignf(x, y)) \
  MSL_FUNCTION2(divide, x / y) \
  MSL_FUNCTION2(fmax, __builtin_fmaxf(x, y)) \
  MSL_FUNCTION2(fmin, __builtin_fminf(x, y)) \
  MSL_FUNCTION2(fmod, ::fmodf(x, y)) \
  MSL_FUNCTION2(max, __builtin_fmaxf(x, y)) \
  MSL_FUNCTION2(min, __builtin_fminf(x, y)) \
  MSL_FUNCTION2(pow, ::powf(x, y)) \
  MSL_FUNCTION2(powr, ::powf(x, y)) \
  MSL_FUNCTION2(step, y < x ? 0.0f : 1.0f) \
  MSL_FUNCTION3(clamp, __builtin_fminf(__builtin_fmaxf(x, y), z)) \
  MSL_FUNCTION3(fma, __builtin_fmaf(x, y, z)) \
  MSL_FUNCTION3(max3, __builtin_fmaxf(__builtin_fmaxf(x, y), z)) \
  MSL_FUNCTION3(min3, __builtin_fminf(__builtin_fminf(x, y), z)) \
  MSL_FUNCTION3(mix, x + (y - x) * z) \
  MSL_INLINE float ldexp(float x, int exponent) { return ::ldexpf(x, exponent); } \
  MSL_INLINE float sincos(float x, thread float& cosine) { return cosine = ::cosf(x), ::sinf(x); }

namespace metal {
MSL_FLOAT_FUNCTIONS
namespace precise {
MSL_FLOAT_FUNCTIONS
}
namespace fast {
MSL_FLOAT_FUNCTIONS
}

#define MSL_CLASS(name, EXPRESSION) \
  MSL_OF1(bool, float, name, EXPRESSION) \
  MSL_OF1(bool, half, name, name((float)x))
MSL_CLASS(isfinite, __builtin_isfinite(x))
MSL_CLASS(isinf, __builtin_isinf(x))
MSL_CLASS(isnan, __builtin_isnan(x))
MSL_CLASS(isnormal, __builtin_isnormal(x))
MSL_CLASS(signbit, __builtin_signbit(x))

#define MSL_DOT(T) \
  MSL_INLINE T dot(T##2 a, T##2 b) { return a.x * b.x + a.y * b.y; } \
  MSL_INLINE T dot(T##3 a, T##3 b) { return a.x * b.x + a.y * b.y + a.z * b.z; } \
  MSL_INLINE T dot(T##4 a, T##4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
MSL_DOT(float)
MSL_DOT(half)
template <class V>
MSL_INLINE typename msl_vector<V>::element length_squared(V v) {
  return dot(v, v);
}
template <class V>
MSL_INLINE typename msl_vector<V>::element length(V v) {
  return sqrt(dot(v, v));
}

template <class V>
MSL_INLINE bool any(V v) {
  if constexpr (msl_vector<V>::width == 0) {
    return (bool)v;
  } else {
    bool found = false;
    for (int i = 0; i < msl_vector<V>::width; i++) found |= v[i] != 0;
    return found;
  }
}
template <class V>
MSL_INLINE bool all(V v) {
  if constexpr (msl_vector<V>::width == 0) {
    return (bool)v;
  } else {
    return !any(v == 0);
  }
}
template <class V, class C>
MSL_INLINE V select(V a, V b, C condition) {
  if constexpr (msl_vector<V>::width == 0) {
    return condition ? b : a;
  } else {
    V result;
    for (int i = 0; i < msl_vector<V>::width; i++) result[i] = condition[i] ? b[i] : a[i];
    return result;
  }
}
}  // namespace metal
