// What a compiled kernel and the runtime know of each other. Included by both; freestanding.
#pragma once

// The position of a thread, and the sizes of what it is part of.
struct emu_ids {
  unsigned thread_in_grid[3], group_in_grid[3], thread_in_group[3];
  unsigned threads_per_group[3], threads_per_grid[3], groups_per_grid[3];
  unsigned thread_index, lane, simdgroup, num_simdgroups;
};

// What the lanes of one SIMD-group gave to a collective. The first lane to go on may leave a shared result.
struct emu_exchange {
  unsigned mask;               // the lanes that take part
  unsigned lane;               // the running one
  int has_result;
  const unsigned char* slots;  // 16 bytes of each lane
  unsigned char* result;       // 256 bytes
};

enum emu_access_kind { EMU_READ, EMU_WRITE, EMU_ATOMIC, EMU_ATOMIC_STORE };

typedef void (*emu_kernel)(void* const* buffers, const emu_ids* ids);

extern "C" {
// Waits for all lanes of the SIMD-group to reach the same call.
emu_exchange* emu_collective(const char* op, const void* value, unsigned size, const char* file, int line, int column);
void emu_threadgroup_barrier(int flags, const char* file, int line, int column);
void emu_simdgroup_barrier(int flags, const char* file, int line, int column);
// The memory of a threadgroup variable of the running threadgroup: poisoned when the group starts.
void* emu_threadgroup_variable(int id, unsigned long size, const char* name);
// Checks an access that library code makes for the kernel; does nothing in an unchecked launch.
void emu_touch(const void* address, unsigned size, emu_access_kind kind, const char* file, int line);
unsigned emu_lane(void);
unsigned emu_thread(void);  // in its threadgroup
void emu_fail(const char* message, const char* file, int line);
}
