// Atomics: relaxed, the only order Metal has for them.
#pragma once

namespace metal {
enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T value;
};
template <class T>
using _atomic = atomic<T>;
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;
typedef atomic<float> atomic_float;

// One thread runs at a time, so plain accesses are atomic enough; the runtime sees what kind they stand for.
#define MSL_ATOMIC(kind) \
  T* address = (T*)(uintptr_t)&object->value; \
  MSL_TOUCH(address, kind); \
  T old = *address
#define MSL_ATOMIC_UPDATE(SPACE, name, EXPRESSION) \
  template <class T> \
  MSL_LIBRARY T atomic_##name##_explicit(volatile SPACE atomic<T>* object, T value, memory_order, MSL_SITE) { \
    MSL_ATOMIC(EMU_ATOMIC); \
    *address = EXPRESSION; \
    return old; \
  }
#define MSL_ATOMICS(SPACE) \
  MSL_ATOMIC_UPDATE(SPACE, exchange, value) \
  MSL_ATOMIC_UPDATE(SPACE, fetch_add, old + value) \
  MSL_ATOMIC_UPDATE(SPACE, fetch_sub, old - value) \
  MSL_ATOMIC_UPDATE(SPACE, fetch_min, value < old ? value : old) \
  MSL_ATOMIC_UPDATE(SPACE, fetch_max, old < value ? value : old) \
  MSL_ATOMIC_UPDATE(SPACE, fetch_and, old & value) \
  MSL_ATOMIC_UPDATE(SPACE, fetch_or, old | value) \
  MSL_ATOMIC_UPDATE(SPACE, fetch_xor, old ^ value) \
  template <class T> \
  MSL_LIBRARY T atomic_load_explicit(const volatile SPACE atomic<T>* object, memory_order, MSL_SITE) { \
    MSL_ATOMIC(EMU_ATOMIC); \
    return old; \
  } \
  template <class T> \
  MSL_LIBRARY void atomic_store_explicit(volatile SPACE atomic<T>* object, T value, memory_order, MSL_SITE) { \
    MSL_ATOMIC(EMU_ATOMIC_STORE); \
    *address = value; \
  } \
  template <class T> \
  MSL_LIBRARY bool atomic_compare_exchange_weak_explicit(volatile SPACE atomic<T>* object, thread T* expected, \
                                                         T value, memory_order, memory_order, MSL_SITE) { \
    MSL_ATOMIC(EMU_ATOMIC); \
    bool is_equal = old == *expected; \
    if (is_equal) *address = value; \
    else *expected = old; \
    return is_equal; \
  }
MSL_ATOMICS(device)
#ifdef MSL_STRICT
MSL_ATOMICS(threadgroup)
#endif
}  // namespace metal
