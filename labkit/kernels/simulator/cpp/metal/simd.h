// Barriers and simdgroup functions. Each brings the lane's value to its simdgroup (lk_exchange), which lets the others run;
// the call's line tells calls apart, so that lanes at different ones are noticed.
#pragma once
#include "math.h"

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8, mem_object_data = 16 };
LK_INLINE mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags((int)a | (int)b); }
LK_INLINE void threadgroup_barrier(mem_flags f, LK_CALLER_LINE) { lk_threadgroup_barrier((unsigned)f, line_); }
LK_INLINE void simdgroup_barrier(mem_flags f, LK_CALLER_LINE) { lk_simdgroup_barrier((unsigned)f, line_); }

template <class T> LK_INLINE lk::Exchange exchange(T& v, lk::Operation operation, int line, lk::Reduce reduce = nullptr) {
  static_assert(sizeof(T) <= 64);
  return lk_exchange(&v, sizeof v, reduce, operation, line);
}
// What lane `i` brought. A lane that took no part has no defined value: reported, and read as what it last held.
template <class T> LK_INLINE T value_of(const lk::Exchange& x, uint i, int line) {
  if (!(x.mask >> (i & 31) & 1)) lk_inactive_lane(i & 31, line);
  T t;
  __builtin_memcpy(&t, x.slots + 64 * (i & 31), sizeof t);
  return t;
}

// ------------------------------------------------------------------ reductions
struct Add { template <class T> static LK_INLINE T identity() { return T(0); } template <class T> static LK_INLINE T apply(T a, T b) { return T(a + b); } };
struct Multiply { template <class T> static LK_INLINE T identity() { return T(1); } template <class T> static LK_INLINE T apply(T a, T b) { return T(a * b); } };
struct Max {
  template <class T> static LK_INLINE T identity() {
    typedef typename element_of<T>::type E;
    if constexpr (std::is_integral_v<E>) return T(std::numeric_limits<E>::lowest());
    else return T(E(-__builtin_inff()));
  }
  template <class T> static LK_INLINE T apply(T a, T b) { return max(a, b); }
};
struct Min {
  template <class T> static LK_INLINE T identity() {
    typedef typename element_of<T>::type E;
    if constexpr (std::is_integral_v<E>) return T(std::numeric_limits<E>::max());
    else return T(E(__builtin_inff()));
  }
  template <class T> static LK_INLINE T apply(T a, T b) { return min(a, b); }
};
struct And { template <class T> static LK_INLINE T identity() { return T(~T(0)); } template <class T> static LK_INLINE T apply(T a, T b) { return T(a & b); } };
struct Or { template <class T> static LK_INLINE T identity() { return T(0); } template <class T> static LK_INLINE T apply(T a, T b) { return T(a | b); } };
struct Xor { template <class T> static LK_INLINE T identity() { return T(0); } template <class T> static LK_INLINE T apply(T a, T b) { return T(a ^ b); } };

// In the order of an ascending xor butterfly: distances 1, 2, 4, 8, 16.
template <class T, class Op> LK_OPAQUE void reduce_lanes(const char* slots, uint32_t mask, void* out) {
  T a[32];
  for (int i = 0; i < 32; i++) {
    if (mask >> i & 1) __builtin_memcpy(&a[i], slots + 64 * i, sizeof(T));
    else a[i] = Op::template identity<T>();
  }
  for (int d = 1; d < 32; d *= 2)
    for (int i = 0; i < 32; i += 2 * d) a[i] = Op::apply(a[i], a[i + d]);
  __builtin_memcpy(out, &a[0], sizeof(T));
}
#define LK_REDUCTION(name, Op)                                                        \
  template <class T> LK_INLINE T name(T v, LK_CALLER_LINE) {                          \
    lk::Exchange x = exchange(v, lk::kReduce, line_, reduce_lanes<T, Op>);            \
    T r;                                                                              \
    __builtin_memcpy(&r, x.combined, sizeof r);                                       \
    return r;                                                                         \
  }
LK_REDUCTION(simd_sum, Add) LK_REDUCTION(simd_product, Multiply) LK_REDUCTION(simd_max, Max) LK_REDUCTION(simd_min, Min)
LK_REDUCTION(simd_and, And) LK_REDUCTION(simd_or, Or) LK_REDUCTION(simd_xor, Xor)
#undef LK_REDUCTION

// ------------------------------------------------------------------ shuffles
template <class T> LK_INLINE T simd_shuffle(T v, ushort lane, LK_CALLER_LINE) { return value_of<T>(exchange(v, lk::kShuffle, line_), lane, line_); }
template <class T> LK_INLINE T simd_broadcast(T v, ushort lane, LK_CALLER_LINE) { return value_of<T>(exchange(v, lk::kBroadcast, line_), lane, line_); }
template <class T> LK_INLINE T simd_broadcast_first(T v, LK_CALLER_LINE) {
  lk::Exchange x = exchange(v, lk::kBroadcast, line_);
  return value_of<T>(x, __builtin_ctz(x.mask), line_);
}
template <class T> LK_INLINE T simd_shuffle_xor(T v, ushort mask, LK_CALLER_LINE) {
  lk::Exchange x = exchange(v, lk::kShuffleXor, line_);
  return value_of<T>(x, x.lane ^ mask, line_);
}
// Lanes past the edge keep their own value.
template <class T> LK_INLINE T simd_shuffle_down(T v, ushort delta, LK_CALLER_LINE) {
  lk::Exchange x = exchange(v, lk::kShuffleDown, line_);
  return x.lane + delta < 32 ? value_of<T>(x, x.lane + delta, line_) : v;
}
template <class T> LK_INLINE T simd_shuffle_up(T v, ushort delta, LK_CALLER_LINE) {
  lk::Exchange x = exchange(v, lk::kShuffleUp, line_);
  return x.lane >= delta ? value_of<T>(x, x.lane - delta, line_) : v;
}
template <class T> LK_INLINE T simd_shuffle_rotate_down(T v, ushort delta, LK_CALLER_LINE) {
  lk::Exchange x = exchange(v, lk::kShuffleDown, line_);
  return value_of<T>(x, (x.lane + delta) & 31, line_);
}
template <class T> LK_INLINE T simd_shuffle_rotate_up(T v, ushort delta, LK_CALLER_LINE) {
  lk::Exchange x = exchange(v, lk::kShuffleUp, line_);
  return value_of<T>(x, (x.lane - delta) & 31, line_);
}
template <class T> struct WithFill { T value, fill; };
template <class T> LK_INLINE T simd_shuffle_and_fill_up(T v, T fill, ushort delta, LK_CALLER_LINE) {
  WithFill<T> p{v, fill};
  lk::Exchange x = exchange(p, lk::kFill, line_);
  return x.lane >= delta ? value_of<WithFill<T>>(x, x.lane - delta, line_).value : value_of<WithFill<T>>(x, 32 + x.lane - delta, line_).fill;
}
template <class T> LK_INLINE T simd_shuffle_and_fill_down(T v, T fill, ushort delta, LK_CALLER_LINE) {
  WithFill<T> p{v, fill};
  lk::Exchange x = exchange(p, lk::kFill, line_);
  return x.lane + delta < 32 ? value_of<WithFill<T>>(x, x.lane + delta, line_).value : value_of<WithFill<T>>(x, x.lane + delta - 32, line_).fill;
}

// ------------------------------------------------------------------ prefix operations, over the active lanes
template <class T, class Op> LK_INLINE T prefix(const lk::Exchange& x, uint end, int line) {
  T r = Op::template identity<T>();
  for (uint i = 0; i < end; i++) if (x.mask >> i & 1) r = Op::apply(r, value_of<T>(x, i, line));
  return r;
}
#define LK_PREFIX(name, Op, Inclusive)                                                       \
  template <class T> LK_INLINE T name(T v, LK_CALLER_LINE) {                                 \
    lk::Exchange x = exchange(v, lk::kPrefix, line_);                                        \
    return prefix<T, Op>(x, x.lane + Inclusive, line_);                                      \
  }
LK_PREFIX(simd_prefix_inclusive_sum, Add, 1) LK_PREFIX(simd_prefix_exclusive_sum, Add, 0)
LK_PREFIX(simd_prefix_inclusive_product, Multiply, 1) LK_PREFIX(simd_prefix_exclusive_product, Multiply, 0)
#undef LK_PREFIX

// ------------------------------------------------------------------ votes
struct simd_vote {
  typedef uint64_t vote_t;
  vote_t bits;
  LK_INLINE explicit operator vote_t() const { return bits; }
  LK_INLINE bool all() const { return (uint32_t)bits == ~0u; }
  LK_INLINE bool any() const { return bits != 0; }
};
LK_INLINE simd_vote simd_ballot(bool v, LK_CALLER_LINE) {
  lk::Exchange x = exchange(v, lk::kVote, line_);
  simd_vote r{0};
  for (uint i = 0; i < 32; i++) if (x.mask >> i & 1 && value_of<bool>(x, i, line_)) r.bits |= 1ull << i;
  return r;
}
LK_INLINE simd_vote simd_active_threads_mask(LK_CALLER_LINE) {
  char nothing = 0;
  return {exchange(nothing, lk::kVote, line_).mask};
}
LK_INLINE bool simd_any(bool v, LK_CALLER_LINE) { return simd_or(uint(v), line_) != 0; }
LK_INLINE bool simd_all(bool v, LK_CALLER_LINE) { return simd_and(uint(v), line_) != 0; }
LK_INLINE bool simd_is_first(LK_CALLER_LINE) {
  char nothing = 0;
  lk::Exchange x = exchange(nothing, lk::kVote, line_);
  return x.lane == (uint)__builtin_ctz(x.mask);
}

// ------------------------------------------------------------------ groups of four lanes
template <class T> LK_INLINE T quad_shuffle_xor(T v, ushort mask, LK_CALLER_LINE) { return simd_shuffle_xor(v, mask & 3, line_); }
template <class T> LK_INLINE T quad_broadcast(T v, ushort lane, LK_CALLER_LINE) {
  lk::Exchange x = exchange(v, lk::kBroadcast, line_);
  return value_of<T>(x, (x.lane & ~3u) | (lane & 3), line_);
}
template <class T> LK_INLINE T quad_sum(T v, LK_CALLER_LINE) {
  v = T(v + simd_shuffle_xor(v, 1, line_));
  return T(v + simd_shuffle_xor(v, 2, line_));
}
template <class T> LK_INLINE T quad_max(T v, LK_CALLER_LINE) {
  v = max(v, simd_shuffle_xor(v, 1, line_));
  return max(v, simd_shuffle_xor(v, 2, line_));
}
template <class T> LK_INLINE T quad_min(T v, LK_CALLER_LINE) {
  v = min(v, simd_shuffle_xor(v, 1, line_));
  return min(v, simd_shuffle_xor(v, 2, line_));
}

}  // namespace metal
