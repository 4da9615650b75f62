// Stacks for fibers, and the switch from one to another.
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "runtime.h"

// emu_switch saves the callee-saved registers on the running stack and its pointer in *save, and goes on on the other.
#if defined(__x86_64__)
__asm__(R"(
.text
.globl emu_switch
.hidden emu_switch
.type emu_switch,@function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch,.-emu_switch
)");

void* fresh_stack_pointer(u8* stack) {
  void** top = (void**)(stack + STACK_BYTES - 64);
  *--top = nullptr;  // the return address that emu_fiber never uses keeps the stack aligned
  *--top = (void*)emu_fiber;
  for (int i = 0; i < 6; i++) *--top = nullptr;
  return top;
}
#elif defined(__aarch64__)
__asm__(R"(
.text
.globl emu_switch
.hidden emu_switch
emu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");

void* fresh_stack_pointer(u8* stack) {
  u64* top = (u64*)(stack + STACK_BYTES - 64 - 160);
  memset(top, 0, 160);
  top[11] = (u64)emu_fiber;  // the saved link register
  return top;
}
#else
#error "fibers are written for x86-64 and arm64"
#endif

// ---------------------------------------------------------------- stacks
// Each ends at a guard that no one may touch. Made once; a returned thread hands its stack to one that starts.
static struct {
  u8* memory;
  u32 num_made, num_free;
  u8* free[MAX_THREADS];
  void* main_pointer;
} stacks;

constexpr size_t STRIDE = STACK_BYTES + GUARD_BYTES;

u8* take_stack() {
  if (stacks.num_free) return stacks.free[--stacks.num_free];
  if (!stacks.memory) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    stacks.memory = (u8*)mmap(nullptr, MAX_THREADS * STRIDE, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (stacks.memory == MAP_FAILED) abort();
  }
  u8* guard = stacks.memory + stacks.num_made++ * STRIDE;
  mprotect(guard, GUARD_BYTES, PROT_NONE);
  return guard + GUARD_BYTES;
}

void give_back_stack(u8* stack) { stacks.free[stacks.num_free++] = stack; }

void give_back_all_stacks() {
  stacks.num_free = 0;
  for (u32 i = 0; i < stacks.num_made; i++) give_back_stack(stacks.memory + i * STRIDE + GUARD_BYTES);
}

bool is_in_stacks(uintptr_t address) { return address - (uintptr_t)stacks.memory < MAX_THREADS * STRIDE; }

void enter_fibers(u8* stack) { emu_switch(&stacks.main_pointer, fresh_stack_pointer(stack)); }

void leave_fibers() {
  void* unused;
  emu_switch(&unused, stacks.main_pointer);
  abort();
}
