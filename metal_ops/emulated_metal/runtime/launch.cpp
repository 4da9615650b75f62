// A launch: its threadgroups one after another, in the order asked for, with faults turned into messages.
#include <link.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "runtime.h"

Machine machine;

// ---------------------------------------------------------------- faults
static void append_nearest_buffer(uintptr_t address) {
  const Launch* launch = machine.launch;
  for (u32 i = 0; i < launch->num_buffers; i++) {
    long offset = (long)(address - (uintptr_t)launch->buffers[i]), size = (long)launch->sizes[i];
    if (offset < -NEAR_BYTES || offset > size + NEAR_BYTES) continue;
    append("; byte offset %ld of buffer %u of %ld bytes", offset, i, size);
  }
}

static void on_fault(int signal_number, siginfo_t* fault, void*) {
  uintptr_t address = (uintptr_t)fault->si_addr;
  if (!machine.is_running) {
    signal(signal_number, SIG_DFL);
    raise(signal_number);
    return;
  }
  if (signal_number == SIGSEGV || signal_number == SIGBUS) {
    if (is_in_stacks(address)) fail("stack overflow (over %zu KB of private memory in a thread)", STACK_BYTES >> 10);
    append("memory fault at address 0x%lx", address);
    append_nearest_buffer(address);
  } else if (address >= machine.code_start && address < machine.code_end) {
    append("undefined behaviour at ");
    append_place(place_of_code(address));
    append(" (index outside an array, misaligned vector, bad shift, division by zero or float too large for int)");
  } else {
    append("undefined behaviour");
  }
  stop();
}

constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP};
constexpr int NUM_FAULTS = sizeof FAULTS / sizeof *FAULTS;

struct FaultHandlers {
  struct sigaction replaced[NUM_FAULTS];
  stack_t replaced_stack;

  FaultHandlers() {
    alignas(16) static u8 stack[64 << 10];
    stack_t own = {};
    own.ss_sp = stack;
    own.ss_size = sizeof stack;
    sigaltstack(&own, &replaced_stack);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < NUM_FAULTS; i++) sigaction(FAULTS[i], &action, &replaced[i]);
  }
  ~FaultHandlers() {
    for (int i = 0; i < NUM_FAULTS; i++) sigaction(FAULTS[i], &replaced[i], nullptr);
    sigaltstack(&replaced_stack, nullptr);
  }
};

// Python's handler only notes an interrupt, for when the launch is over, which a kernel that loops for ever never is:
// the first interrupt is noted, the second one ends the process.
struct InterruptHandler {
  static struct sigaction noting;
  bool is_ours;

  static void on_interrupt(int signal_number) { noting.sa_handler(signal_number); }

  InterruptHandler() {
    sigaction(SIGINT, nullptr, &noting);
    // Whoever ignores interrupts, or ends at the first, goes on to.
    is_ours = noting.sa_handler != SIG_IGN && noting.sa_handler != SIG_DFL && !(noting.sa_flags & SA_SIGINFO);
    struct sigaction action = {};
    action.sa_handler = on_interrupt;
    action.sa_flags = SA_RESETHAND | SA_ONSTACK;
    if (is_ours) sigaction(SIGINT, &action, nullptr);
  }
  ~InterruptHandler() {
    if (is_ours) sigaction(SIGINT, &noting, nullptr);
  }
};
struct sigaction InterruptHandler::noting;

// ---------------------------------------------------------------- start
static int find_code(struct dl_phdr_info* object, size_t, void*) {
  uintptr_t end = 0, kernel = (uintptr_t)machine.launch->kernel;
  for (int i = 0; i < object->dlpi_phnum; i++) {
    const auto& segment = object->dlpi_phdr[i];
    uintptr_t segment_end = object->dlpi_addr + segment.p_vaddr + segment.p_memsz;
    if (segment.p_type == PT_LOAD && segment_end > end) end = segment_end;
  }
  if (kernel < object->dlpi_addr || kernel >= end) return 0;
  machine.code_start = object->dlpi_addr;
  machine.code_end = end;
  return 1;
}

static void start_threads() {
  const u32* size = machine.launch->threads;
  machine.num_threads = size[0] * size[1] * size[2];
  for (u32 i = 0; i < machine.num_threads; i++) {
    emu_ids* ids = &machine.threads[i].ids;
    ids->thread_in_group[0] = i % size[0];
    ids->thread_in_group[1] = i / size[0] % size[1];
    ids->thread_in_group[2] = i / (size[0] * size[1]);
    for (int k = 0; k < 3; k++) {
      ids->threads_per_group[k] = size[k];
      ids->threads_per_grid[k] = size[k] * machine.launch->grid[k];
      ids->groups_per_grid[k] = machine.launch->grid[k];
    }
    ids->thread_index = i;
    ids->lane = i % SIMD_WIDTH;
    ids->simdgroup = i / SIMD_WIDTH;
    ids->num_simdgroups = (machine.num_threads + SIMD_WIDTH - 1) / SIMD_WIDTH;
  }
}

// The threadgroups in a random order: a step that shares no factor with their number visits each once.
static u64 random_step(u64 total) {
  for (;;) {
    u64 step = random_number() % total + 1, a = total, b = step;
    while (b) {
      u64 rest = a % b;
      a = b;
      b = rest;
    }
    if (a == 1) return step;
  }
}

// Runs the launch. Returns 0, or 1 with the message in launch->error. The sizes have been checked.
extern "C" int emu_launch(Launch* launch) {
  machine.launch = launch;
  machine.has_failed = false;
  machine.error[0] = 0;
  machine.random = launch->seed * 0x9e3779b97f4a7c15 + 88172645463325252;
  dl_iterate_phdr(find_code, nullptr);
  start_threads();
  start_memory_checks();
  {
    FaultHandlers fault_handlers;
    InterruptHandler interrupt_handler;
    const u32* grid = launch->grid;
    u64 total = (u64)grid[0] * grid[1] * grid[2];
    bool is_random = launch->order == RANDOM;
    u64 first = is_random ? random_number() % total : 0, step = is_random ? random_step(total) : 1;
    for (u64 i = 0; i < total && !machine.has_failed; i++) {
      u64 k = launch->order == REVERSE ? total - 1 - i : (first + i * step) % total;
      u32 position[3] = {(u32)(k % grid[0]), (u32)(k / grid[0] % grid[1]), (u32)(k / ((u64)grid[0] * grid[1]))};
      run_threadgroup(position);
    }
  }
  end_memory_checks();
  if (machine.has_failed) snprintf(launch->error, launch->error_bytes, "%s", machine.error);
  return machine.has_failed;
}
