// Conversions that clang calls by name where the processor has none; its own runtime library is not linked.
#include <string.h>

#include "runtime.h"

static u32 bits_of(float value) { return __builtin_bit_cast(u32, value); }
static float float_of(u32 bits) { return __builtin_bit_cast(float, bits); }

// To nearest, ties to even; a NaN stays one.
static u16 bfloat_bits(float value) {
  u32 bits = bits_of(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return (u16)(bits >> 16 | 0x40);
  return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static u16 half_bits(float value) {
  u32 bits = bits_of(value);
  u16 sign = (u16)(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00 | (u16)(bits >> 13 & 0x3ff);
  if (bits >= 0x477ff000) return sign | 0x7c00;
  // A subnormal half counts 2^-24: adding 0.5 leaves that count, rounded, in the low bits.
  if (bits < 0x38800000) return sign | (u16)(bits_of(float_of(bits) + 0.5f) - bits_of(0.5f));
  return sign | (u16)((bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13);
}

static float half_value(u16 half) {
  u32 sign = (u32)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 0x3ff;
  if (exponent == 31) return float_of(sign | 0x7f800000 | mantissa << 13);
  if (exponent) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
  return float_of(sign | bits_of((float)mantissa * 0x1p-24f));
}

extern "C" {
__bf16 __truncsfbf2(float value) { return __builtin_bit_cast(__bf16, bfloat_bits(value)); }
_Float16 __truncsfhf2(float value) { return __builtin_bit_cast(_Float16, half_bits(value)); }
float __extendhfsf2(_Float16 value) { return half_value(__builtin_bit_cast(u16, value)); }
}
