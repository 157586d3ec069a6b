// Keeps a kernel that goes wild from taking Python down. Buffers lie between reserved pages that nobody may touch, inputs
// are read-only, and a fault of the processor inside of a launch ends the launch with a report.
#pragma once
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "state.h"

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

namespace lk {

static sigjmp_buf launch_entry;
static pthread_t launch_thread;
static volatile bool guarding, stop_by_signal;
static volatile int unheard_stops;
constexpr int kGuarded[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
static struct sigaction previous_actions[4];
static char signal_stack[64 * 1024];

inline void on_fault(int number, siginfo_t* info, void*) {
  if (!guarding || !pthread_equal(pthread_self(), launch_thread)) {  // not ours: hand on to who was there before
    for (int i = 0; i < 4; i++) if (kGuarded[i] == number) sigaction(number, &previous_actions[i], nullptr);
    raise(number);
    return;
  }
  if (stop_by_signal) {
    // The host asks to stop, and asks again every 50 ms. In check mode the next load or store is a safe point; a kernel that
    // comes to none for so long is not inside of the runtime, and can be left as in plain mode.
    stop_by_signal = false;
    stop_requested = true;
    if (launch.check && ++unheard_stops < 5) return;
  }
  Fault f = fault_at_line(stop_requested ? kStopped : kCrash, 0);
  f.signal = number;
  f.address = stop_requested ? 0 : (uint64_t)info->si_addr;
  if (!stop_requested)
    for (int i = 0; i < (int)launch.request->buffer_count; i++) {
      const Buffer& b = launch.request->buffers[i];
      int64_t offset = (int64_t)(f.address - (uint64_t)b.data);
      if (number != SIGFPE && offset >= -(1ll << 34) && offset < (int64_t)b.bytes + (1ll << 34)) { f.buffer = i; f.byte = offset; break; }
    }
  report(f);
  siglongjmp(launch_entry, 1);
}

inline void guard_signals(stack_t* old_stack) {
  stack_t own{};
  own.ss_sp = signal_stack;
  own.ss_size = sizeof signal_stack;
  sigaltstack(&own, old_stack);
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < 4; i++) sigaction(kGuarded[i], &action, &previous_actions[i]);
  launch_thread = pthread_self();
  stop_requested = false;
  stop_by_signal = false;
  unheard_stops = 0;
  guarding = true;
}

inline void unguard_signals(const stack_t* old_stack) {
  guarding = false;
  for (int i = 0; i < 4; i++) sigaction(kGuarded[i], &previous_actions[i], nullptr);
  sigaltstack(old_stack, nullptr);
}

inline uint64_t page_round(uint64_t n) {
  uint64_t page = sysconf(_SC_PAGESIZE);
  return (n + page - 1) / page * page;
}

}  // namespace lk

#define LK_EXPORT extern "C" __attribute__((visibility("default")))

// `bytes` zero bytes that end where the forbidden pages begin (32-byte aligned), with `guard` forbidden bytes on both sides.
// With guards of 16 GiB no 32-bit index of a 4-byte element reaches anything else.
LK_EXPORT char* lk_map(uint64_t bytes, uint64_t guard) {
  uint64_t size = lk::page_round(bytes ? bytes : 1);
  char* base = (char*)mmap(nullptr, size + 2 * guard, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return nullptr;
  if (mprotect(base + guard, size, PROT_READ | PROT_WRITE)) { munmap(base, size + 2 * guard); return nullptr; }
  return base + guard + size - (bytes + 31) / 32 * 32;
}

LK_EXPORT void lk_unmap(char* data, uint64_t bytes, uint64_t guard) {
  uint64_t size = lk::page_round(bytes ? bytes : 1);
  char* end = data + (bytes + 31) / 32 * 32;
  munmap(end - size - guard, size + 2 * guard);
}

LK_EXPORT void lk_make_read_only(char* data, uint64_t bytes) {
  uint64_t size = lk::page_round(bytes ? bytes : 1);
  mprotect(data + (bytes + 31) / 32 * 32 - size, size, PROT_READ);
}

// Called from another thread than the launch's: end it at the next safe point.
LK_EXPORT void lk_stop() {
  lk::stop_by_signal = true;
  if (lk::guarding) pthread_kill(lk::launch_thread, SIGSEGV);
}
