// Barriers, and the functions that the 32 lanes of a SIMD-group call together.
#pragma once

namespace metal {
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
MSL_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((int)a | (int)b); }

MSL_INLINE void threadgroup_barrier(mem_flags flags, MSL_SITE) {
  emu_threadgroup_barrier((int)flags, file, line, column);
}
MSL_INLINE void simdgroup_barrier(mem_flags flags, MSL_SITE) { emu_simdgroup_barrier((int)flags, file, line, column); }

// What Metal's library takes: numbers of up to 4 bytes and vectors of them, no bfloat.
template <class T, class E = typename msl_vector<T>::element>
constexpr bool msl_is_exchangeable = (__is_same(E, float) || __is_same(E, half) || __is_integral(E)) && sizeof(E) <= 4;

#define MSL_EXCHANGE(op, value) \
  static_assert(msl_is_exchangeable<T>, "a SIMD-group function that is not defined for this type"); \
  T given = value; \
  emu_exchange* exchange = emu_collective(op, &given, sizeof(T), file, line, column)

template <class T>
MSL_LIBRARY T msl_slot(const emu_exchange* exchange, uint lane) {
  T value;
  __builtin_memcpy(&value, exchange->slots + 16 * lane, sizeof(T));
  return value;
}
MSL_LIBRARY bool msl_takes_part(const emu_exchange* exchange, uint lane) {
  return lane < 32 && exchange->mask >> lane & 1;
}

// By pairs, then pairs of pairs. Computed once, by the first lane that goes on. Lanes are missing only at the end.
template <class T, class F>
MSL_LIBRARY T msl_reduce(emu_exchange* exchange, F combine) {
  T result;
  if (!exchange->has_result) {
    T values[32];
    uint count = __builtin_popcount(exchange->mask);
    for (uint i = 0; i < count; i++) values[i] = msl_slot<T>(exchange, i);
    for (uint step = 1; step < count; step *= 2)
      for (uint i = 0; i + step < count; i += 2 * step) values[i] = combine(values[i], values[i + step]);
    __builtin_memcpy(exchange->result, &values[0], sizeof(T));
    exchange->has_result = 1;
  }
  __builtin_memcpy(&result, exchange->result, sizeof(T));
  return result;
}
#define MSL_REDUCTION(name, EXPRESSION) \
  template <class T> \
  MSL_LIBRARY T name(T x, MSL_SITE) { \
    MSL_EXCHANGE(#name, x); \
    return msl_reduce<T>(exchange, [](T a, T b) MSL_UNCHECKED -> T { return EXPRESSION; }); \
  }
MSL_REDUCTION(simd_sum, a + b)
MSL_REDUCTION(simd_product, a* b)
MSL_REDUCTION(simd_max, max(a, b))
MSL_REDUCTION(simd_min, min(a, b))
MSL_REDUCTION(simd_and, a& b)
MSL_REDUCTION(simd_or, a | b)
MSL_REDUCTION(simd_xor, a ^ b)

#define MSL_SCAN(name, IDENTITY, OPERATOR, END) \
  template <class T> \
  MSL_LIBRARY T name(T x, MSL_SITE) { \
    MSL_EXCHANGE(#name, x); \
    T result = T(IDENTITY); \
    for (uint i = 0; i < END; i++) \
      if (msl_takes_part(exchange, i)) result = result OPERATOR msl_slot<T>(exchange, i); \
    return result; \
  }
MSL_SCAN(simd_prefix_inclusive_sum, 0, +, exchange->lane + 1)
MSL_SCAN(simd_prefix_exclusive_sum, 0, +, exchange->lane)
MSL_SCAN(simd_prefix_inclusive_product, 1, *, exchange->lane + 1)
MSL_SCAN(simd_prefix_exclusive_product, 1, *, exchange->lane)

// The value of another lane. That of a lane that does not exist is undefined in Metal: a NaN here.
template <class T>
MSL_LIBRARY T msl_pick(const emu_exchange* exchange, uint lane) {
  if (msl_takes_part(exchange, lane)) return msl_slot<T>(exchange, lane);
  T undefined;
  __builtin_memset(&undefined, 0xff, sizeof(T));
  return undefined;
}
#define MSL_SHUFFLE(name, LANE) \
  template <class T> \
  MSL_LIBRARY T name(T x, ushort n, MSL_SITE) { \
    MSL_EXCHANGE(#name, x); \
    return msl_pick<T>(exchange, LANE); \
  }
MSL_SHUFFLE(simd_shuffle, n)
MSL_SHUFFLE(simd_broadcast, n)
MSL_SHUFFLE(simd_shuffle_down, exchange->lane + n)
MSL_SHUFFLE(simd_shuffle_up, exchange->lane - n)
MSL_SHUFFLE(simd_shuffle_xor, exchange->lane ^ n)
MSL_SHUFFLE(simd_shuffle_rotate_down, (exchange->lane + n) & 31)
MSL_SHUFFLE(simd_shuffle_rotate_up, (exchange->lane - n) & 31)
// Of the 4 lanes of a quad; all lanes of the SIMD-group exchange.
MSL_SHUFFLE(quad_broadcast, (exchange->lane & ~3u) + (n & 3))
MSL_SHUFFLE(quad_shuffle_xor, exchange->lane ^ (n & 3))

template <class T>
MSL_LIBRARY T simd_shuffle_and_fill_down(T x, T fill, ushort n, MSL_SITE) {
  MSL_EXCHANGE("simd_shuffle_and_fill_down", x);
  return exchange->lane + n < 32 ? msl_pick<T>(exchange, exchange->lane + n) : fill;
}
template <class T>
MSL_LIBRARY T simd_shuffle_and_fill_up(T x, T fill, ushort n, MSL_SITE) {
  MSL_EXCHANGE("simd_shuffle_and_fill_up", x);
  return exchange->lane >= n ? msl_pick<T>(exchange, exchange->lane - n) : fill;
}
template <class T>
MSL_LIBRARY T simd_broadcast_first(T x, MSL_SITE) {
  MSL_EXCHANGE("simd_broadcast_first", x);
  return msl_pick<T>(exchange, __builtin_ctz(exchange->mask));
}

MSL_LIBRARY uint msl_ballot(const char* op, bool x, const char* file, int line, int column) {
  using T = uint;
  MSL_EXCHANGE(op, x ? 1u << emu_lane() : 0u);
  return msl_reduce<T>(exchange, [](T a, T b) MSL_UNCHECKED -> T { return a | b; });
}
struct simd_vote {
  using vote_t = ulong;
  vote_t votes;
  explicit constexpr simd_vote(vote_t v = 0) : votes(v) {}
  explicit operator vote_t() const { return votes; }
  bool all() const { return (uint)votes == ~0u; }
  bool any() const { return votes != 0; }
};
MSL_LIBRARY simd_vote simd_ballot(bool x, MSL_SITE) {
  return simd_vote(msl_ballot("simd_ballot", x, file, line, column));
}
MSL_LIBRARY simd_vote simd_active_threads_mask(MSL_SITE) {
  return simd_vote(msl_ballot("simd_active_threads_mask", true, file, line, column));
}
MSL_LIBRARY bool simd_any(bool x, MSL_SITE) { return msl_ballot("simd_any", x, file, line, column) != 0; }
MSL_LIBRARY bool simd_all(bool x, MSL_SITE) { return msl_ballot("simd_all", !x, file, line, column) == 0; }
MSL_LIBRARY bool simd_is_first(MSL_SITE) {
  return emu_lane() == (uint)__builtin_ctz(msl_ballot("simd_is_first", true, file, line, column));
}
}  // namespace metal
