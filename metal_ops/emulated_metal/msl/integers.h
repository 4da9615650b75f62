// Integer functions. As for floats: one overload a type.
#pragma once

namespace metal {
#define MSL_INTEGER_FUNCTIONS(T) \
  MSL_OF1(T, T, popcount, __builtin_popcountl((ulong)x & (~0ul >> (64 - 8 * sizeof(T))))) \
  MSL_OF2(T, max, x < y ? y : x) \
  MSL_OF2(T, min, y < x ? y : x) \
  MSL_OF3(T, clamp, min(max(x, y), z)) \
  MSL_OF3(T, max3, max(max(x, y), z)) \
  MSL_OF3(T, min3, min(min(x, y), z))
MSL_INTEGER_FUNCTIONS(char)
MSL_INTEGER_FUNCTIONS(uchar)
MSL_INTEGER_FUNCTIONS(short)
MSL_INTEGER_FUNCTIONS(ushort)
MSL_INTEGER_FUNCTIONS(int)
MSL_INTEGER_FUNCTIONS(uint)
MSL_INTEGER_FUNCTIONS(long)
MSL_INTEGER_FUNCTIONS(ulong)

MSL_OF1(short, short, abs, x < 0 ? -x : x)
MSL_OF1(int, int, abs, x < 0 ? -x : x)
MSL_OF1(long, long, abs, x < 0 ? -x : x)
MSL_OF1(uint, uint, clz, x ? __builtin_clz(x) : 32)
MSL_OF1(uint, uint, ctz, x ? __builtin_ctz(x) : 32)
MSL_OF1(uint, uint, reverse_bits, __builtin_bitreverse32(x))
MSL_OF2(uint, absdiff, x > y ? x - y : y - x)
MSL_OF2(uint, mulhi, (ulong)x * y >> 32)
MSL_OF2(uint, rotate, x << (y & 31) | x >> (-y & 31))

MSL_INLINE uint msl_low_bits(uint count) { return count >= 32 ? ~0u : (1u << count) - 1; }
MSL_INLINE uint extract_bits(uint x, uint offset, uint bits) { return x >> offset & msl_low_bits(bits); }
MSL_INLINE uint insert_bits(uint base, uint insert, uint offset, uint bits) {
  uint mask = msl_low_bits(bits) << offset;
  return (base & ~mask) | (insert << offset & mask);
}
}  // namespace metal
