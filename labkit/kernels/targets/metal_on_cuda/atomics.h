// Metal's atomics over CUDA's, all in relaxed order as there.

//@provides atomic atomic_int atomic_uint atomic_float memory_order_relaxed memory_order_seq_cst thread_scope_device thread_scope_threadgroup
namespace metal {
enum memory_order { memory_order_relaxed, memory_order_seq_cst };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
template <class T> struct atomic { T inside; };
using atomic_int = atomic<int>; using atomic_uint = atomic<uint>; using atomic_float = atomic<float>;
// MLX has no atomic outputs on CUDA: what a kernel gets for one is a plain pointer.
template <class T> LK_DEVICE T* lk_place(T* plain) { return plain; }
template <class T> LK_DEVICE T* lk_place(atomic<T>* object) { return &object->inside; }
template <class T> LK_DEVICE T* lk_place(volatile atomic<T>* object) { return const_cast<T*>(&object->inside); }
template <class P> using lk_content = decltype(*lk_place((P*)nullptr) + *lk_place((P*)nullptr));
#define LK_CHANGE(name, change, value)                                                          \
  template <class P, class V> LK_DEVICE lk_content<P> atomic_##name##_explicit(P* object, V by, memory_order) { \
    return change(lk_place(object), lk_content<P>(value));                                      \
  }
LK_CHANGE(exchange, atomicExch, by) LK_CHANGE(fetch_add, atomicAdd, by) LK_CHANGE(fetch_sub, atomicAdd, -by)
LK_CHANGE(fetch_max, atomicMax, by) LK_CHANGE(fetch_min, atomicMin, by)
LK_CHANGE(fetch_and, atomicAnd, by) LK_CHANGE(fetch_or, atomicOr, by) LK_CHANGE(fetch_xor, atomicXor, by)
template <class P> LK_DEVICE lk_content<P> atomic_load_explicit(P* object, memory_order) {
  return *static_cast<volatile lk_content<P>*>(lk_place(object));
}
template <class P, class V> LK_DEVICE void atomic_store_explicit(P* object, V value, memory_order) {
  *static_cast<volatile lk_content<P>*>(lk_place(object)) = lk_content<P>(value);
}
template <class P, class E, class V>
LK_DEVICE bool atomic_compare_exchange_weak_explicit(P* object, E* expected, V desired, memory_order, memory_order) {
  E wanted = *expected;
  *expected = atomicCAS(lk_place(object), wanted, E(desired));
  return *expected == wanted;
}
}
