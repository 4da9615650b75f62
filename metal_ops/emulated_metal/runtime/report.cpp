// Messages. A place in the kernel's code is left as "at {pc:0x...}", which launch.py turns into "at file:line".
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "runtime.h"

constexpr Place IS_CALL = 1u << 31;
constexpr u32 MAX_CALLS = 1024;
constexpr u32 MAX_SHOWN_SITES = 6;

static struct {
  const char* file;
  int line;
} calls[MAX_CALLS];
static u32 num_calls, last_call;

Place place_of_code(uintptr_t pc) { return (Place)(pc - machine.code_start); }

Place place_of_call(const char* file, int line) {
  auto is_it = [&](u32 i) { return calls[i].line == line && calls[i].file == file; };
  if (last_call < num_calls && is_it(last_call)) return IS_CALL | last_call;
  for (last_call = 0; last_call < num_calls; last_call++)
    if (is_it(last_call)) return IS_CALL | last_call;
  if (num_calls == MAX_CALLS) num_calls = last_call = 0;
  calls[last_call] = {file, line};
  num_calls++;
  return IS_CALL | last_call;
}

static void append_list(const char* format, va_list arguments) {
  size_t used = strlen(machine.error);
  vsnprintf(machine.error + used, sizeof machine.error - used, format, arguments);
}

void append(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  append_list(format, arguments);
  va_end(arguments);
}

void append_place(Place place) {
  if (place & IS_CALL) append("%s:%d", calls[place & ~IS_CALL].file, calls[place & ~IS_CALL].line);
  else append("{pc:0x%x}", place);
}

void stop() {
  const emu_ids* ids = &machine.current->ids;
  const u32* group = ids->group_in_grid;
  append(" [thread %u (SIMD-group %u lane %u)", ids->thread_index, ids->simdgroup, ids->lane);
  append(" of threadgroup (%u, %u, %u)]", group[0], group[1], group[2]);
  machine.has_failed = true;
  leave_fibers();
}

void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  append_list(format, arguments);
  va_end(arguments);
  stop();
}

static bool is_alike(const Thread* a, const Thread* b) {
  if (a->state != b->state) return false;
  if (a->state == NEW || a->state == RETURNED) return true;
  return a->site.line == b->site.line && a->site.column == b->site.column && !strcmp(a->site.op, b->site.op);
}

// Threads that wait for each other and will never meet: who stands where.
void fail_divergent() {
  bool is_barrier = false;
  for (u32 i = 0; i < machine.num_threads; i++) is_barrier |= machine.threads[i].state == WAITS_AT_BARRIER;
  append(is_barrier ? "divergent threadgroup_barrier (not reached by all threads of the threadgroup)"
                    : "divergent SIMD-group function (not reached by all lanes of the SIMD-group)");
  u32 num_shown = 0;
  for (u32 i = 0; i < machine.num_threads && num_shown < MAX_SHOWN_SITES; i++) {
    const Thread* thread = &machine.threads[i];
    bool is_first = true;
    for (u32 j = 0; j < i; j++) is_first &= !is_alike(thread, &machine.threads[j]);
    if (!is_first || thread->state == NEW || thread->state == READY) continue;
    u32 count = 0, last = i;
    for (u32 j = i; j < machine.num_threads; j++) {
      if (!is_alike(thread, &machine.threads[j])) continue;
      count++;
      last = j;
    }
    append("; %u threads (%u..%u) ", count, i, last);
    const Site* site = &thread->site;
    if (thread->state == RETURNED) append("have returned");
    else append("wait at %s at %s:%d", site->op, site->file, site->line);
    num_shown++;
  }
  stop();
}

extern "C" void emu_fail(const char* message, const char* file, int line) { fail("%s at %s:%d", message, file, line); }
