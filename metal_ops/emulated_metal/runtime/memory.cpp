// Threadgroup memory, and the checks of a checked launch: bounds, uninitialised threadgroup memory, data races.
//
// Every byte has a shadow: who last wrote it, who last read it, who last changed it atomically, and in which interval
// between barriers. Two accesses are ordered if one thread made both, or a barrier with the right mem_flags lies
// between.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "runtime.h"

constexpr size_t MAX_THREADGROUP_BYTES = 48 << 10;  // of what a launch may grant
constexpr int MAX_VARIABLES = 64;
constexpr size_t GAP_BYTES = 4096;  // between threadgroup variables, so that an overrun meets none
constexpr size_t ARENA_BYTES = MAX_THREADGROUP_BYTES + MAX_VARIABLES * (GAP_BYTES + 64);
constexpr u32 MAX_REGIONS = 31 + MAX_VARIABLES;
constexpr size_t MAX_SHADOWED_BYTES = 64 << 20;  // of a buffer; races in a larger one go unseen
constexpr u32 MAX_STORE_BYTES = 256;

struct Stamp {
  u64 interval : 30;       // threadgroup_barriers of the launch so far, by memory; never 0
  u64 simd_interval : 22;  // simdgroup_barriers of the SIMD-group so far
  u64 who : 12;            // 0 nobody, thread + 1, SEVERAL | SIMD-group, or EVERYWHERE
};
constexpr u64 SEVERAL = 2048, EVERYWHERE = 4095;

struct Record {
  Stamp stamp;
  Place place;
};

struct Shadow {
  Record write, read;
};

struct Region {
  uintptr_t start, end;
  Shadow* shadow;   // of each byte; none of a buffer that no one writes
  Record* atomics;  // of each byte, from the first atomic access on
  const char* name;
  u32 index;
  bool is_written, is_threadgroup;
};

static Region no_region;

static struct {
  Region regions[MAX_REGIONS];
  Region* last;  // the one accessed last
  u32 num_regions, num_buffers;
  u8* arena;
  Shadow* arena_shadow;
  Record* arena_atomics;
  size_t arena_used, threadgroup_bytes;
  struct {
    size_t offset, size;
  } variables[MAX_VARIABLES];
  u64 threadgroup_interval, device_interval;              // now
  u64 first_threadgroup_interval, first_device_interval;  // of this threadgroup
} memory;

// A store over what another thread stored without a barrier between: a race only if it changes a byte.
static struct {
  uintptr_t address;
  u32 size;
  Place place;
  Region* region;
  Record earlier;
  bool is_other_group;
  u8 before[MAX_STORE_BYTES];
} pending;

static void* reserve(size_t size) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* made = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (made == MAP_FAILED) abort();
  return made;
}

// ---------------------------------------------------------------- messages
static const char* verb(emu_access_kind kind) {
  if (kind == EMU_READ) return "read";
  return kind == EMU_WRITE ? "write" : "atomic access";
}

static void append_region(const Region* region) {
  if (region->is_threadgroup) append("threadgroup %s", region->name);
  else append("buffer %u", region->index);
}

[[noreturn]] static void fail_bounds(uintptr_t address, u32 size, emu_access_kind kind, Place place) {
  if (is_in_stacks(address)) {
    append("stack overflow (over %zu KB of private memory in a thread) at ", STACK_BYTES >> 10);
    append_place(place);
    stop();
  }
  append("out-of-bounds %s of %u bytes at ", verb(kind), size);
  append_place(place);
  const Region* nearest = nullptr;
  uintptr_t best = NEAR_BYTES;
  for (u32 i = 0; i < memory.num_regions; i++) {
    const Region* region = &memory.regions[i];
    uintptr_t distance = address < region->start ? region->start - address : address + size - region->end;
    if (distance >= best) continue;
    best = distance;
    nearest = region;
  }
  append(": ");
  if (!nearest) fail("the address is near no buffer");
  append_region(nearest);
  fail(" has %lu bytes, access at byte offset %ld", nearest->end - nearest->start, (long)(address - nearest->start));
}

[[noreturn]] static void fail_race(const Region* region, uintptr_t address, emu_access_kind kind, Place place,
                                   const Record& earlier, emu_access_kind earlier_kind, bool is_other_group) {
  append("data race on ");
  append_region(region);
  append(" byte offset %lu: %s at ", address - region->start, verb(kind));
  append_place(place);
  append(", earlier %s at ", verb(earlier_kind));
  append_place(earlier.place);
  if (is_other_group) fail(" by another threadgroup (threadgroups are not ordered)");
  if (earlier.stamp.who & SEVERAL) append(" by several threads");
  else append(" by thread %u", (u32)earlier.stamp.who - 1);
  fail(", no %s barrier between", region->is_threadgroup ? "mem_threadgroup" : "mem_device");
}

// ---------------------------------------------------------------- order of accesses
static u64 simdgroup_of(u64 who) { return who & SEVERAL ? who & ~SEVERAL : (who - 1) / SIMD_WIDTH; }

enum Conflict { NONE, IN_GROUP, OTHER_GROUP };

static Conflict conflict(Stamp earlier, Stamp now, const Region* region) {
  if (!earlier.who) return NONE;
  u64 first = region->is_threadgroup ? memory.first_threadgroup_interval : memory.first_device_interval;
  if (earlier.interval < first) return region->is_threadgroup ? NONE : OTHER_GROUP;
  if (earlier.interval < now.interval || earlier.who == now.who) return NONE;
  if (earlier.who == EVERYWHERE) return IN_GROUP;
  bool is_same_simdgroup = simdgroup_of(earlier.who) == simdgroup_of(now.who);
  return is_same_simdgroup && earlier.simd_interval < now.simd_interval ? NONE : IN_GROUP;
}

// Reads and atomic accesses of several threads do not exclude each other: all are kept in mind.
static void record_beside_others(Record* record, Stamp now, Place place) {
  Stamp earlier = record->stamp;
  *record = {now, place};
  if (!earlier.who || earlier.interval != now.interval || earlier.who == now.who) return;
  if (earlier.who == EVERYWHERE || simdgroup_of(earlier.who) != simdgroup_of(now.who)) record->stamp.who = EVERYWHERE;
  else if (earlier.simd_interval == now.simd_interval) record->stamp.who = SEVERAL | simdgroup_of(now.who);
}

void settle_write() {
  if (__builtin_expect(!pending.size, 1)) return;
  u32 size = pending.size;
  pending.size = 0;
  for (u32 k = 0; k < size; k++)
    if (((u8*)pending.address)[k] != pending.before[k])
      fail_race(pending.region, pending.address + k, EMU_WRITE, pending.place, pending.earlier, EMU_WRITE,
                pending.is_other_group);
}

// ---------------------------------------------------------------- the check of one access
// The region of an address; none if it is one of the kernel's own constants.
static Region* region_of(uintptr_t address, u32 size, emu_access_kind kind, Place place) {
  Region* found = memory.last;
  if (address >= found->start && address + size <= found->end) return found;
  for (u32 i = 0; i < memory.num_regions; i++) {
    Region* region = &memory.regions[i];
    if (address < region->start || address >= region->end) continue;
    if (address + size > region->end) fail_bounds(address, size, kind, place);
    return memory.last = region;
  }
  bool is_constant = kind == EMU_READ && address >= machine.code_start && address < machine.code_end;
  if (!is_constant) fail_bounds(address, size, kind, place);
  return nullptr;
}

static void check_initialised(const Region* region, size_t offset, Place place) {
  u64 first = memory.first_threadgroup_interval;
  if (region->shadow[offset].write.stamp.interval >= first) return;
  if (region->atomics && region->atomics[offset].stamp.interval >= first) return;
  append("read of uninitialised threadgroup memory '%s' byte offset %zu at ", region->name, offset);
  append_place(place);
  stop();
}

static void start_atomics(Region* region) {
  size_t size = region->end - region->start;
  if (region->is_threadgroup) region->atomics = memory.arena_atomics + (region->shadow - memory.arena_shadow);
  else region->atomics = (Record*)reserve(size * sizeof(Record));
}

void check_access(uintptr_t address, u32 size, emu_access_kind kind, Place place, bool is_store_to_come) {
  settle_write();
  Thread* thread = machine.current;
  if (address - (uintptr_t)thread->stack < STACK_BYTES) return;
  Region* region = region_of(address, size, kind, place);
  if (!region) return;
  if (!region->shadow) {
    if (kind == EMU_READ || region->is_written) return;
    append("write to read-only buffer %u at ", region->index);
    append_place(place);
    stop();
  }
  const SimdGroup* group = &machine.simdgroups[thread->ids.simdgroup];
  Stamp now;
  now.interval = region->is_threadgroup ? memory.threadgroup_interval : memory.device_interval;
  now.simd_interval = region->is_threadgroup ? group->threadgroup_fences : group->device_fences;
  now.who = thread->ids.thread_index + 1;
  bool is_atomic = kind == EMU_ATOMIC || kind == EMU_ATOMIC_STORE;
  if (is_atomic && !region->atomics) start_atomics(region);
  for (u32 k = 0; k < size; k++) {
    size_t offset = address + k - region->start;
    Shadow* shadow = region->shadow + offset;
    if (region->is_threadgroup && (kind == EMU_READ || kind == EMU_ATOMIC)) check_initialised(region, offset, place);
    if (Conflict found = conflict(shadow->write.stamp, now, region)) {
      if (!is_store_to_come || size > MAX_STORE_BYTES)
        fail_race(region, address + k, kind, place, shadow->write, EMU_WRITE, found == OTHER_GROUP);
      if (!pending.size) {
        pending = {address, size, place, region, shadow->write, found == OTHER_GROUP, {}};
        memcpy(pending.before, (void*)address, size);
      }
    }
    if (kind != EMU_READ)
      if (Conflict found = conflict(shadow->read.stamp, now, region))
        fail_race(region, address + k, kind, place, shadow->read, EMU_READ, found == OTHER_GROUP);
    if (region->atomics && !is_atomic)
      if (Conflict found = conflict(region->atomics[offset].stamp, now, region))
        fail_race(region, address + k, kind, place, region->atomics[offset], EMU_ATOMIC, found == OTHER_GROUP);
    if (kind == EMU_WRITE) shadow->write = {now, place};
    else record_beside_others(is_atomic ? &region->atomics[offset] : &shadow->read, now, place);
  }
}

// ---------------------------------------------------------------- the life of memory
extern "C" void* emu_threadgroup_variable(int id, unsigned long size, const char* name) {
  if (id >= MAX_VARIABLES) fail("more than %d threadgroup variables", MAX_VARIABLES);
  auto& variable = memory.variables[id];
  if (variable.size == size) return memory.arena + variable.offset;
  memory.threadgroup_bytes += (size + 15) & ~15ul;
  size_t limit = machine.launch->threadgroup_bytes;
  if (memory.threadgroup_bytes > limit)
    fail("threadgroup memory of %zu bytes is over the limit of %zu", memory.threadgroup_bytes, limit);
  u8* start = memory.arena + memory.arena_used;
  variable = {memory.arena_used, size};
  memset(start, 0xff, size);  // a NaN of every float type
  if (machine.launch->is_checked) {
    Shadow* shadow = memory.arena_shadow + memory.arena_used;
    uintptr_t address = (uintptr_t)start;
    memory.regions[memory.num_regions++] = {address, address + size, shadow, nullptr, name, 0, true, true};
  }
  memory.arena_used += ((size + 63) & ~63ul) + GAP_BYTES;
  return start;
}

// Buffers that overlap are one region: a kernel may be given one tensor twice.
static void add_buffer(u32 index, uintptr_t start, uintptr_t end, bool is_written) {
  for (u32 i = 0; i < memory.num_regions; i++) {
    Region* region = &memory.regions[i];
    if (start >= region->end || end <= region->start) continue;
    if (start < region->start) region->start = start;
    if (end > region->end) region->end = end;
    region->is_written |= is_written;
    return;
  }
  memory.regions[memory.num_regions++] = {start, end, nullptr, nullptr, nullptr, index, is_written, false};
}

void start_memory_checks() {
  if (!memory.arena) {
    memory.arena = (u8*)reserve(ARENA_BYTES);
    memory.arena_shadow = (Shadow*)reserve(ARENA_BYTES * sizeof(Shadow));
    memory.arena_atomics = (Record*)reserve(ARENA_BYTES * sizeof(Record));
  }
  memory.num_regions = 0;
  memory.threadgroup_interval = memory.device_interval = 0;
  const Launch* launch = machine.launch;
  if (!launch->is_checked) return;
  for (u32 i = 0; i < launch->num_buffers; i++) {
    uintptr_t start = (uintptr_t)launch->buffers[i];
    if (launch->sizes[i]) add_buffer(i, start, start + launch->sizes[i], launch->is_written[i]);
  }
  for (u32 i = 0; i < memory.num_regions; i++) {
    Region* region = &memory.regions[i];
    size_t size = region->end - region->start;
    if (region->is_written && size <= MAX_SHADOWED_BYTES) region->shadow = (Shadow*)reserve(size * sizeof(Shadow));
  }
  memory.num_buffers = memory.num_regions;
}

void end_memory_checks() {
  if (!machine.launch->is_checked) return;
  for (u32 i = 0; i < memory.num_buffers; i++) {
    Region* region = &memory.regions[i];
    size_t size = region->end - region->start;
    if (region->shadow) munmap(region->shadow, size * sizeof(Shadow));
    if (region->atomics) munmap(region->atomics, size * sizeof(Record));
  }
  // All zero again.
  madvise(memory.arena_shadow, ARENA_BYTES * sizeof(Shadow), MADV_DONTNEED);
  madvise(memory.arena_atomics, ARENA_BYTES * sizeof(Record), MADV_DONTNEED);
}

void start_threadgroup_memory() {
  pending.size = 0;
  memset(memory.variables, 0, sizeof memory.variables);
  memory.arena_used = memory.threadgroup_bytes = 0;
  memory.num_regions = memory.num_buffers;
  memory.last = &no_region;
  memory.first_threadgroup_interval = ++memory.threadgroup_interval;
  memory.first_device_interval = ++memory.device_interval;
}

void fence_memory(int flags) {
  if (flags & MEM_THREADGROUP) memory.threadgroup_interval++;
  if (flags & MEM_DEVICE) memory.device_interval++;
}
