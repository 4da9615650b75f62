// One fiber a GPU thread, switched only where threads wait for each other: SIMD collectives and barriers.
#include <string.h>

#include "runtime.h"

// ---------------------------------------------------------------- who runs next
static struct {
  u16 threads[MAX_THREADS];
  u32 first, count;
} ready;

u64 random_number() {
  u64 x = machine.random;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return machine.random = x;
}

static void make_ready(u32 index) { ready.threads[(ready.first + ready.count++) % MAX_THREADS] = (u16)index; }

static Thread* next_ready() {
  if (!ready.count) return nullptr;
  u16* first = &ready.threads[ready.first];
  if (machine.launch->order == RANDOM) {
    u16* chosen = &ready.threads[(ready.first + random_number() % ready.count) % MAX_THREADS];
    u16 swapped = *first;
    *first = *chosen;
    *chosen = swapped;
  }
  ready.first = (ready.first + 1) % MAX_THREADS;
  ready.count--;
  return &machine.threads[*first];
}

// The running thread waits: another one runs until this one is ready again.
static void run_others(Thread* waiting) {
  Thread* next = next_ready();
  if (!next) fail_divergent();
  machine.current = next;
  if (next == waiting) return;
  if (next->state == NEW) {
    next->stack = take_stack();
    next->stack_pointer = fresh_stack_pointer(next->stack);
  }
  emu_switch(&waiting->stack_pointer, next->stack_pointer);
}

// The life of a fiber: it runs threads that start one after another, until it has to continue one that waited.
extern "C" void emu_fiber() {
  for (;;) {
    Thread* thread = machine.current;
    thread->state = READY;
    machine.launch->kernel(machine.launch->buffers, &thread->ids);
    settle_write();
    thread->state = RETURNED;
    machine.num_live--;
    SimdGroup* group = &machine.simdgroups[thread->ids.simdgroup];
    group->live &= ~(1u << thread->ids.lane);
    bool left_lanes_waiting = group->arrived && group->arrived == group->live;
    bool left_barrier_waiting = machine.num_at_barrier && machine.num_at_barrier == machine.num_live;
    if (left_lanes_waiting || left_barrier_waiting) fail_divergent();
    Thread* next = next_ready();
    if (!next) {
      if (machine.num_live) fail_divergent();
      leave_fibers();
    }
    machine.current = next;
    if (next->state == NEW) {
      next->stack = thread->stack;
      continue;
    }
    give_back_stack(thread->stack);
    emu_switch(&thread->stack_pointer, next->stack_pointer);
  }
}

// ---------------------------------------------------------------- SIMD collectives
static bool is_same_text(const char* a, const char* b) { return a == b || !strcmp(a, b); }

static bool is_same_call(const Site& a, const Site& b) {
  return a.line == b.line && a.column == b.column && is_same_text(a.op, b.op) && is_same_text(a.file, b.file);
}

static void release_lanes(SimdGroup* group, u32 simdgroup, Thread* running) {
  emu_exchange* exchange = &group->exchange[group->turn];
  exchange->mask = group->arrived;
  exchange->has_result = 0;
  exchange->slots = group->slots[group->turn];
  exchange->result = group->result[group->turn];
  group->turn ^= 1;
  group->arrived = 0;
  for (u32 k = 0; k < SIMD_WIDTH; k++) {
    u32 lane = machine.launch->order == REVERSE ? SIMD_WIDTH - 1 - k : k;
    Thread* thread = &machine.threads[simdgroup * SIMD_WIDTH + lane];
    if (!(exchange->mask >> lane & 1) || thread == running) continue;
    thread->state = READY;
    make_ready(thread->ids.thread_index);
  }
}

extern "C" emu_exchange* emu_collective(const char* op, const void* value, unsigned size, const char* file, int line,
                                        int column) {
  settle_write();
  Thread* thread = machine.current;
  SimdGroup* group = &machine.simdgroups[thread->ids.simdgroup];
  u32 lane = thread->ids.lane;
  memcpy(group->slots[group->turn] + 16 * lane, value, size);
  thread->site = {op, file, line, column, 0};
  if (!group->arrived) {
    group->site = thread->site;
    group->is_mixed = false;
  } else if (!is_same_call(group->site, thread->site)) {
    group->is_mixed = true;
  }
  group->arrived |= 1u << lane;
  emu_exchange* exchange = &group->exchange[group->turn];
  if (group->arrived == group->live) {
    if (group->is_mixed || group->live != group->all) {
      thread->state = WAITS_FOR_LANES;
      fail_divergent();
    }
    release_lanes(group, thread->ids.simdgroup, thread);
  } else {
    thread->state = WAITS_FOR_LANES;
    run_others(thread);
  }
  exchange->lane = lane;
  return exchange;
}

extern "C" void emu_simdgroup_barrier(int flags, const char* file, int line, int column) {
  u32 nothing = 0;
  emu_exchange* exchange = emu_collective("simdgroup_barrier", &nothing, sizeof nothing, file, line, column);
  if (exchange->has_result) return;
  exchange->has_result = 1;
  SimdGroup* group = &machine.simdgroups[machine.current->ids.simdgroup];
  if (flags & MEM_THREADGROUP) group->threadgroup_fences++;
  if (flags & MEM_DEVICE) group->device_fences++;
}

extern "C" unsigned emu_lane(void) { return machine.current->ids.lane; }
extern "C" unsigned emu_thread(void) { return machine.current->ids.thread_index; }

// ---------------------------------------------------------------- threadgroup barriers
static void release_barrier(Thread* running) {
  machine.num_at_barrier = 0;
  for (u32 k = 0; k < machine.num_threads; k++) {
    u32 i = machine.launch->order == REVERSE ? machine.num_threads - 1 - k : k;
    Thread* thread = &machine.threads[i];
    if (thread == running) continue;
    thread->state = READY;
    make_ready(i);
  }
}

extern "C" void emu_threadgroup_barrier(int flags, const char* file, int line, int column) {
  settle_write();
  Thread* thread = machine.current;
  thread->site = {"threadgroup_barrier", file, line, column, flags};
  thread->state = WAITS_AT_BARRIER;
  if (++machine.num_at_barrier < machine.num_live) {
    run_others(thread);
    return;
  }
  for (u32 i = 0; i < machine.num_threads; i++) {
    Thread* other = &machine.threads[i];
    bool is_here = other->state == WAITS_AT_BARRIER && is_same_call(other->site, thread->site);
    if (!is_here || other->site.flags != flags) fail_divergent();
  }
  fence_memory(flags);
  release_barrier(thread);
  thread->state = READY;
  if (machine.launch->order == FIFO) return;
  make_ready(thread->ids.thread_index);
  run_others(thread);
}

// ---------------------------------------------------------------- a threadgroup
static void start_simdgroup(SimdGroup* group, u32 num_lanes) {
  group->all = group->live = num_lanes >= SIMD_WIDTH ? ~0u : (1u << num_lanes) - 1;
  group->arrived = group->turn = group->threadgroup_fences = group->device_fences = 0;
}

void run_threadgroup(const u32 position[3]) {
  const Launch* launch = machine.launch;
  u32 count = machine.num_threads;
  machine.num_live = count;
  machine.num_at_barrier = 0;
  ready.first = ready.count = 0;
  start_threadgroup_memory();
  for (u32 s = 0; s * SIMD_WIDTH < count; s++) start_simdgroup(&machine.simdgroups[s], count - s * SIMD_WIDTH);
  for (u32 i = 0; i < count; i++) {
    emu_ids* ids = &machine.threads[i].ids;
    machine.threads[i].state = NEW;
    for (int k = 0; k < 3; k++) {
      ids->group_in_grid[k] = position[k];
      ids->thread_in_grid[k] = position[k] * launch->threads[k] + ids->thread_in_group[k];
    }
    make_ready(launch->order == REVERSE ? count - 1 - i : i);
  }
  Thread* first = next_ready();
  machine.current = first;
  first->stack = take_stack();
  machine.is_running = true;
  enter_fibers(first->stack);
  machine.is_running = false;
  give_back_all_stacks();
}
