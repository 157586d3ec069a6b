// Metal's atomics. One thread runs at a time, so a plain load and store are one step; the runtime is told of each, lets other
// threads run after one that changed nothing, and takes them as what orders threadgroups.
#pragma once
#include "simd.h"

namespace metal {

enum memory_order { memory_order_relaxed, memory_order_seq_cst };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
LK_INLINE void atomic_thread_fence(mem_flags flags, memory_order = memory_order_seq_cst, thread_scope = thread_scope_device) { lk_atomic_fence((unsigned)flags); }

template <class T> struct atomic { T value; };
using atomic_ulong = atomic<ulong>;
using atomic_uint = atomic<uint>;
using atomic_int = atomic<int>;
using atomic_bool = atomic<bool>;
using atomic_float = atomic<float>;

#define LK_INSTRUCTION __builtin_return_address(0)

template <class T> LK_OPAQUE T atomic_load_explicit(const volatile atomic<T>* p, memory_order) {
  lk_atomic_before(p, sizeof(T), lk::kAtomicLoad, LK_INSTRUCTION);
  T value = p->value;
  lk_atomic_after(p, lk::kAtomicLoad, false);
  return value;
}
template <class T, class V> LK_OPAQUE void atomic_store_explicit(volatile atomic<T>* p, V v, memory_order) {
  lk_atomic_before(p, sizeof(T), lk::kAtomicStore, LK_INSTRUCTION);
  p->value = T(v);
  lk_atomic_after(p, lk::kAtomicStore, true);
}
#define LK_ATOMIC_UPDATE(name, expression)                                                                \
  template <class T, class V> LK_OPAQUE T name(volatile atomic<T>* p, V v, memory_order) {                \
    lk_atomic_before(p, sizeof(T), lk::kAtomicUpdate, LK_INSTRUCTION);                                    \
    T old = p->value, operand = T(v), now = T(expression);                                                \
    p->value = now;                                                                                       \
    lk_atomic_after(p, lk::kAtomicUpdate, old != now);                                                    \
    return old;                                                                                           \
  }
LK_ATOMIC_UPDATE(atomic_fetch_add_explicit, old + operand)
LK_ATOMIC_UPDATE(atomic_fetch_sub_explicit, old - operand)
LK_ATOMIC_UPDATE(atomic_fetch_max_explicit, old > operand ? old : operand)
LK_ATOMIC_UPDATE(atomic_fetch_min_explicit, old < operand ? old : operand)
LK_ATOMIC_UPDATE(atomic_fetch_and_explicit, old & operand)
LK_ATOMIC_UPDATE(atomic_fetch_or_explicit, old | operand)
LK_ATOMIC_UPDATE(atomic_fetch_xor_explicit, old ^ operand)
LK_ATOMIC_UPDATE(atomic_exchange_explicit, operand)
#undef LK_ATOMIC_UPDATE
template <class T, class V> LK_OPAQUE bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* p, T* expected, V desired, memory_order, memory_order) {
  lk_atomic_before(p, sizeof(T), lk::kAtomicUpdate, LK_INSTRUCTION);
  T old = p->value;
  bool equal = old == *expected;
  if (equal) p->value = T(desired);
  else *expected = old;
  lk_atomic_after(p, lk::kAtomicUpdate, equal);
  return equal;
}
#undef LK_INSTRUCTION

}  // namespace metal
