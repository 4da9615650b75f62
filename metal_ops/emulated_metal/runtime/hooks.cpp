// Where the checks come from: library functions, and what clang's -fsanitize=thread calls before each access. Its own
// runtime is not linked.
#include <string.h>

#include "runtime.h"

extern "C" void emu_touch(const void* address, unsigned size, emu_access_kind kind, const char* file, int line) {
  if (!machine.launch->is_checked) return;
  check_access((uintptr_t)address, size, kind, place_of_call(file, line), false);
}

static inline void hook(const volatile void* address, size_t size, emu_access_kind kind, void* return_address) {
  Place place = place_of_code((uintptr_t)return_address - 1);
  check_access((uintptr_t)address, (u32)size, kind, place, kind == EMU_WRITE);
}
#define READ(address, size) hook(address, size, EMU_READ, __builtin_return_address(0))
#define WRITE(address, size) hook(address, size, EMU_WRITE, __builtin_return_address(0))
#define HOOKS(size) \
  void __tsan_read##size(void* p) { READ(p, size); } \
  void __tsan_write##size(void* p) { WRITE(p, size); } \
  void __tsan_unaligned_read##size(void* p) { READ(p, size); } \
  void __tsan_unaligned_write##size(void* p) { WRITE(p, size); } \
  void __tsan_volatile_read##size(void* p) { READ(p, size); } \
  void __tsan_volatile_write##size(void* p) { WRITE(p, size); } \
  void __tsan_read_write##size(void* p) { READ(p, size), WRITE(p, size); } \
  void __tsan_unaligned_read_write##size(void* p) { READ(p, size), WRITE(p, size); }

extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* p, size_t size) { READ(p, size); }
void __tsan_write_range(void* p, size_t size) { WRITE(p, size); }
void* __tsan_memcpy(void* to, const void* from, size_t size) {
  READ(from, size);
  WRITE(to, size);
  return memcpy(to, from, size);
}
void* __tsan_memmove(void* to, const void* from, size_t size) {
  READ(from, size);
  WRITE(to, size);
  return memmove(to, from, size);
}
void* __tsan_memset(void* to, int value, size_t size) {
  WRITE(to, size);
  return memset(to, value, size);
}
}
