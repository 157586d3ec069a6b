// A fiber stops here and another goes on. By hand where the processor is known: what the calling convention wants kept goes on
// the fiber's own stack, the stack pointer into its Context, and the other's come back. Elsewhere, or with -DLK_UCONTEXT, through
// ucontext, which also saves the signal mask: ten times the time.
#pragma once
#include <cstdint>
#include <cstring>

#if !defined(__x86_64__) && !defined(__aarch64__)
#define LK_UCONTEXT
#endif

#ifdef LK_UCONTEXT
#include <ucontext.h>

namespace lk {

struct Context { ucontext_t registers; };

inline void make_context(Context& context, char* stack, size_t size, size_t, void (*entry)()) {
  ucontext_t& fresh = context.registers;
  getcontext(&fresh);
  fresh.uc_link = nullptr;  // entry does not return
  fresh.uc_stack.ss_size = size;
  fresh.uc_stack.ss_sp = stack;
  makecontext(&fresh, entry, 0);
}
inline void switch_context(Context& stops, Context& goes_on) { swapcontext(&stops.registers, &goes_on.registers); }

}  // namespace lk
#else

#ifdef __APPLE__
#define LK_ASM_FUNCTION(name) ".text\n.p2align 4\n.globl _" name "\n_" name ":\n"
#else
#define LK_ASM_FUNCTION(name) ".text\n.p2align 4\n.globl " name "\n.hidden " name "\n.type " name ",@function\n" name ":\n"
#endif

// lk_switch_stack(where the stack pointer is kept, the stack pointer to go on with)
extern "C" void lk_switch_stack(void** kept, void* next);

#ifdef __x86_64__
#define LK_PUSH(r) "push %" r "\n"
#define LK_POP(r) "pop %" r "\n"
asm(LK_ASM_FUNCTION("lk_switch_stack")
    LK_PUSH("r15") LK_PUSH("r14") LK_PUSH("r13") LK_PUSH("r12") LK_PUSH("rbx") LK_PUSH("rbp")
    "mov %rsp, (%rdi)\n"
    "mov %rsi, %rsp\n"
    LK_POP("rbp") LK_POP("rbx") LK_POP("r12") LK_POP("r13") LK_POP("r14") LK_POP("r15")
    "ret\n");
#undef LK_PUSH
#undef LK_POP
constexpr size_t kReturnWord = 6, kFrameWords = 8;  // saved, the return address, and a word that aligns the stack
#else
#define LK_BOTH(op, a, b, at) #op " " a ", " b ", [sp, " at "]\n"
#define LK_EACH_PAIR(op)                                                                                            \
  LK_BOTH(op, "x29", "x30", "#0") LK_BOTH(op, "x27", "x28", "#16") LK_BOTH(op, "x25", "x26", "#32")                 \
  LK_BOTH(op, "x23", "x24", "#48") LK_BOTH(op, "x21", "x22", "#64") LK_BOTH(op, "x19", "x20", "#80")                \
  LK_BOTH(op, "d14", "d15", "#96") LK_BOTH(op, "d12", "d13", "#112") LK_BOTH(op, "d10", "d11", "#128")              \
  LK_BOTH(op, "d8", "d9", "#144")
asm(LK_ASM_FUNCTION("lk_switch_stack")
    "sub sp, sp, #160\n" LK_EACH_PAIR(stp)
    "mov x2, sp\n"
    "str x2, [x0]\n"
    "mov sp, x1\n" LK_EACH_PAIR(ldp)
    "add sp, sp, #160\n"
    "ret\n");
#undef LK_EACH_PAIR
#undef LK_BOTH
constexpr size_t kReturnWord = 1, kFrameWords = 20;  // x30, the return address, is saved second
#endif

namespace lk {

struct Context { void* stack; };

// Fiber number `index` enters at its first switch, as if it came back from one. Its stack starts a few cache lines lower than
// its neighbour's: stacks at distances of a power of two would meet in the same few sets of the first cache.
inline void make_context(Context& context, char* stack, size_t size, size_t index, void (*entry)()) {
  constexpr size_t kStagger = 3 * 64, kSpread = 4096;
  uintptr_t top = reinterpret_cast<uintptr_t>(stack) + size - index * kStagger % kSpread;
  void** frame = reinterpret_cast<void**>(top / 16 * 16) - kFrameWords;
  memset(frame, 0, kFrameWords * sizeof *frame);
  frame[kReturnWord] = reinterpret_cast<void*>(entry);
  context.stack = frame;
}
inline void switch_context(Context& stops, Context& goes_on) { lk_switch_stack(&stops.stack, goes_on.stack); }

}  // namespace lk
#endif
