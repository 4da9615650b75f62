// The machine that executes one launch: a fiber per GPU thread, SIMD-groups of 32, checked memory.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "interface.h"

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

constexpr u32 MAX_THREADS = 1024;
constexpr u32 SIMD_WIDTH = 32;
constexpr u32 MAX_SIMDGROUPS = MAX_THREADS / SIMD_WIDTH;
constexpr size_t STACK_BYTES = 128 << 10;
constexpr long NEAR_BYTES = 16 << 20;     // an address further from a buffer was not meant for it
constexpr size_t GUARD_BYTES = 64 << 10;  // a multiple of every page size in use

enum Order { FIFO, REVERSE, RANDOM };
enum ThreadState { NEW, READY, WAITS_FOR_LANES, WAITS_AT_BARRIER, RETURNED };

// Mirrored by launch.py.
struct Launch {
  emu_kernel kernel;
  u32 grid[3], threads[3];
  u32 num_buffers, order;
  u64 seed;
  void** buffers;
  u64* sizes;
  u8* is_written;
  u32 is_checked, threadgroup_bytes, error_bytes;
  char* error;
};

// A call at which threads wait for each other.
struct Site {
  const char* op;
  const char* file;
  int line, column, flags;
};

struct Thread {
  void* stack_pointer;
  u8* stack;
  ThreadState state;
  Site site;
  emu_ids ids;
};

struct SimdGroup {
  u32 all, live, arrived;              // masks of lanes
  bool is_mixed;                       // the lanes that arrived stand at different calls
  Site site;                           // of the first that arrived
  u32 threadgroup_fences, device_fences;  // simdgroup_barriers passed, by mem_flags
  // Two of each, in turn: a fast lane may start the next exchange while a slow one still reads this one.
  u32 turn;
  emu_exchange exchange[2];
  alignas(16) u8 slots[2][SIMD_WIDTH * 16];
  alignas(16) u8 result[2][256];
};

// One launch runs at a time: the interpreter's lock is held.
struct Machine {
  const Launch* launch;
  bool is_running, has_failed;
  Thread threads[MAX_THREADS];
  SimdGroup simdgroups[MAX_SIMDGROUPS];
  Thread* current;
  u32 num_threads, num_live, num_at_barrier;
  u64 random;
  char error[2048];
  uintptr_t code_start, code_end;  // of the kernel's shared object
};
extern Machine machine;

// stacks.cpp
extern "C" void emu_switch(void** save, void* stack_pointer);
u8* take_stack();
void give_back_stack(u8* stack);
void give_back_all_stacks();
bool is_in_stacks(uintptr_t address);
void* fresh_stack_pointer(u8* stack);  // that of a fiber which starts
void enter_fibers(u8* stack);          // returns when a fiber leaves
[[noreturn]] void leave_fibers();

// fibers.cpp
extern "C" void emu_fiber();
u64 random_number();
void run_threadgroup(const u32 position[3]);

// report.cpp
using Place = u32;  // where an access was made: an offset into the kernel's code, or a call of a library function
Place place_of_code(uintptr_t pc);
Place place_of_call(const char* file, int line);
void append(const char* format, ...) __attribute__((format(printf, 1, 2)));
void append_place(Place place);
[[noreturn]] void stop();
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void fail_divergent();

// memory.cpp
constexpr int MEM_DEVICE = 1, MEM_THREADGROUP = 2;  // bits of mem_flags
void check_access(uintptr_t address, u32 size, emu_access_kind kind, Place place, bool is_store_to_come);
void start_memory_checks();
void end_memory_checks();
void start_threadgroup_memory();
void fence_memory(int flags);
void settle_write();
