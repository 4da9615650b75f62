// Scalars, vectors, constants, traits and limits.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef __UINTPTR_TYPE__ uintptr_t;
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef uchar uint8_t;
typedef ushort uint16_t;
typedef uint uint32_t;
typedef ulong uint64_t;

constexpr half operator""h(long double x) { return (half)x; }
constexpr half operator""H(long double x) { return (half)x; }
constexpr bfloat operator""bf(long double x) { return (bfloat)(float)x; }

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX ((half)65504.0f)
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define M_SQRT2_F 1.41421356237309504880f

// clang's vectors have Metal's swizzles, operators and alignment.
#define MSL_VECTORS(T) \
  typedef T T##2 __attribute__((ext_vector_type(2))); \
  typedef T T##3 __attribute__((ext_vector_type(3))); \
  typedef T T##4 __attribute__((ext_vector_type(4)));
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(float)
// NOTE: a comparison of vectors gives integers of the same width, so a vector of bool is one of int here.
typedef int bool2 __attribute__((ext_vector_type(2)));
typedef int bool3 __attribute__((ext_vector_type(3)));
typedef int bool4 __attribute__((ext_vector_type(4)));

#define MSL_PACKED(T) \
  typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(__alignof__(T)))); \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(__alignof__(T)))); \
  struct packed_##T##3 { \
    T x, y, z; \
    packed_##T##3() = default; \
    packed_##T##3(T##3 v) : x(v.x), y(v.y), z(v.z) {} \
    operator T##3() const { return T##3{x, y, z}; } \
    T& operator[](int i) { return (&x)[i]; } \
    T operator[](int i) const { return (&x)[i]; } \
  };
MSL_PACKED(char)
MSL_PACKED(uchar)
MSL_PACKED(short)
MSL_PACKED(ushort)
MSL_PACKED(int)
MSL_PACKED(uint)
MSL_PACKED(half)
MSL_PACKED(bfloat)
MSL_PACKED(float)

namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

// The width of a vector, 0 of a scalar, and the type of its elements.
template <class T>
struct msl_vector {
  static constexpr int width = 0;
  using element = T;
};
template <class T, int N>
struct msl_vector<T __attribute__((ext_vector_type(N)))> {
  static constexpr int width = N;
  using element = T;
};

template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  constexpr operator T() const { return v; }
};
using true_type = integral_constant<bool, true>;
using false_type = integral_constant<bool, false>;

template <bool condition, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool condition, class T = void>
using enable_if_t = typename enable_if<condition, T>::type;

template <bool condition, class A, class B>
struct conditional {
  using type = A;
};
template <class A, class B>
struct conditional<false, A, B> {
  using type = B;
};
template <bool condition, class A, class B>
using conditional_t = typename conditional<condition, A, B>::type;

#define MSL_TRAIT(name, ...) \
  template <class T> \
  struct name : integral_constant<bool, __VA_ARGS__> {}; \
  template <class T> \
  constexpr bool name##_v = name<T>::value;
MSL_TRAIT(is_integral, __is_integral(T))
MSL_TRAIT(is_floating_point, __is_same(T, float) || __is_same(T, half) || __is_same(T, bfloat))
MSL_TRAIT(is_signed, __is_signed(T))
MSL_TRAIT(is_unsigned, __is_unsigned(T))
MSL_TRAIT(is_arithmetic, is_integral<T>::value || is_floating_point<T>::value)
MSL_TRAIT(is_pointer, __is_pointer(T))
template <class A, class B>
struct is_same : integral_constant<bool, __is_same(A, B)> {};
template <class A, class B>
constexpr bool is_same_v = __is_same(A, B);

template <class T>
struct numeric_limits;
#define MSL_INTEGER_LIMITS(T, LOWEST, MAX) \
  template <> \
  struct numeric_limits<T> { \
    static constexpr T lowest() { return LOWEST; } \
    static constexpr T min() { return LOWEST; } \
    static constexpr T max() { return MAX; } \
  };
MSL_INTEGER_LIMITS(char, -128, 127)
MSL_INTEGER_LIMITS(signed char, -128, 127)
MSL_INTEGER_LIMITS(uchar, 0, 255)
MSL_INTEGER_LIMITS(short, -32768, 32767)
MSL_INTEGER_LIMITS(ushort, 0, 65535)
MSL_INTEGER_LIMITS(int, -2147483647 - 1, 2147483647)
MSL_INTEGER_LIMITS(uint, 0, 4294967295u)
MSL_INTEGER_LIMITS(long, -9223372036854775807l - 1, 9223372036854775807l)
MSL_INTEGER_LIMITS(ulong, 0, 18446744073709551615ul)
#define MSL_FLOAT_LIMITS(T, MIN, MAX, EPSILON) \
  template <> \
  struct numeric_limits<T> { \
    static constexpr T lowest() { return (T)-MAX; } \
    static constexpr T min() { return (T)MIN; } \
    static constexpr T max() { return (T)MAX; } \
    static constexpr T epsilon() { return (T)EPSILON; } \
    static constexpr T infinity() { return (T)__builtin_inff(); } \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); } \
  };
MSL_FLOAT_LIMITS(float, 1.175494351e-38f, 3.402823466e+38f, 1.192092896e-07f)
MSL_FLOAT_LIMITS(half, 6.103515625e-05f, 65504.0f, 9.765625e-04f)
MSL_FLOAT_LIMITS(bfloat, 1.175494351e-38f, 3.38953139e38f, 7.8125e-03f)
}  // namespace metal

template <class T, class U>
MSL_INLINE T as_type(U value) {
  static_assert(sizeof(T) == sizeof(U), "as_type needs types of the same size");
  return __builtin_bit_cast(T, value);
}
