// Switching between fibers: 12 instructions by hand where the processor is known, ucontext elsewhere (ten times slower,
// since it saves the signal mask each way). -DLK_UCONTEXT selects the portable form on any processor.
#pragma once
#include <cstdint>
#include <cstring>

#if !(defined(__x86_64__) || defined(__aarch64__)) && !defined(LK_UCONTEXT)
#define LK_UCONTEXT
#endif
#ifdef LK_UCONTEXT
#include <ucontext.h>
#endif

namespace lk {

#ifdef LK_UCONTEXT
struct Context { ucontext_t saved; };

inline void switch_context(Context& from, Context& to) { swapcontext(&from.saved, &to.saved); }

inline void make_context(Context& c, char* stack, size_t size, size_t /*stagger*/, void (*entry)()) {
  getcontext(&c.saved);
  c.saved.uc_stack.ss_sp = stack;
  c.saved.uc_stack.ss_size = size;
  c.saved.uc_link = nullptr;
  makecontext(&c.saved, entry, 0);
}
#else
struct Context { void* stack_pointer; };

#ifdef __APPLE__
#define LK_SYMBOL(name) "_" #name
#define LK_FUNCTION_TYPE
#else
#define LK_SYMBOL(name) #name
#define LK_FUNCTION_TYPE ".hidden lk_switch_stack\n.type lk_switch_stack,@function\n"
#endif
extern "C" void lk_switch_stack(void** save, void* to);

#if defined(__x86_64__)
asm(".text\n.p2align 4\n.globl " LK_SYMBOL(lk_switch_stack) "\n" LK_FUNCTION_TYPE LK_SYMBOL(lk_switch_stack) R"(:
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
)");
#else
asm(".text\n.p2align 4\n.globl " LK_SYMBOL(lk_switch_stack) "\n" LK_FUNCTION_TYPE LK_SYMBOL(lk_switch_stack) R"(:
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
  mov x9, sp
  str x9, [x0]
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
#endif

inline void switch_context(Context& from, Context& to) { lk_switch_stack(&from.stack_pointer, to.stack_pointer); }

// The first switch to this context "returns" into entry. Stacks start staggered by 192 bytes: at power-of-two distances
// they would share a few L1 sets.
inline void make_context(Context& c, char* stack, size_t size, size_t index, void (*entry)()) {
  uintptr_t top = ((uintptr_t)(stack + size) - ((index * 192) & 4095)) & ~(uintptr_t)15;
#if defined(__x86_64__)
  void** sp = (void**)top;
  *--sp = nullptr;  // the return address of entry, which never returns; also keeps rsp + 8 a multiple of 16 there
  *--sp = (void*)entry;
  sp -= 6;
  memset(sp, 0, 6 * sizeof(void*));
  c.stack_pointer = sp;
#else
  uint64_t* sp = (uint64_t*)(top - 160);
  memset(sp, 0, 160);
  sp[11] = (uint64_t)entry;  // x30
  c.stack_pointer = sp;
#endif
}
#endif

}  // namespace lk
