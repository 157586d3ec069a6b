// Barriers and the functions of simdgroups. A lane brings its value to its simdgroup and waits until all have (lk_exchange); then
// each takes what it wants of what the others brought. The line of the call tells calls apart: lanes that wait at different
// ones are noticed.
#pragma once
#include "math.h"

namespace metal {

enum class mem_flags : unsigned {
  mem_none = 0,
  mem_device = lk::kFlagDevice,
  mem_threadgroup = lk::kFlagThreadgroup,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16,
};
LK_INLINE mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(unsigned(a) | unsigned(b)); }
LK_INLINE void threadgroup_barrier(mem_flags ordered, LK_CALLER_LINE) { lk_threadgroup_barrier(unsigned(ordered), line_); }
LK_INLINE void simdgroup_barrier(mem_flags ordered, LK_CALLER_LINE) { lk_simdgroup_barrier(unsigned(ordered), line_); }

// What all lanes of a simdgroup brought to one call.
constexpr uint kLanes = 32, kSlotBytes = 64;
template <class T> struct Brought {
  static_assert(sizeof(T) <= kSlotBytes, "a lane brings 64 bytes at the most");
  lk::Exchange all;
  int line;

  LK_INLINE Brought(const T& mine, lk::Operation operation, int line, lk::Reduce reduce = nullptr)
      : all(lk_exchange(&mine, sizeof mine, reduce, operation, line)), line(line) {}
  LK_INLINE uint me() const { return all.lane; }
  LK_INLINE bool is_active(uint lane) const { return all.mask >> lane & 1; }
  LK_INLINE uint first_active() const { return __builtin_ctz(all.mask); }
  // Lane numbers go round. Of a lane that took no part the value is undefined: that is reported, and its last one given.
  LK_INLINE T by(uint lane) const {
    lane %= kLanes;
    if (!is_active(lane)) lk_inactive_lane(lane, line);
    return read(all.slots + lane * kSlotBytes);
  }
  LK_INLINE T combined() const { return read(all.combined); }

  static LK_INLINE T read(const char* bytes) {
    T value;
    __builtin_memcpy(&value, bytes, sizeof value);
    return value;
  }
};

// ------------------------------------------------------------------ sums and the like
// An operation with the value that changes nothing in it.
template <class T> LK_INLINE T lowest_of() {
  using Element = typename element_of<T>::type;
  if constexpr (std::is_integral_v<Element>) return T(std::numeric_limits<Element>::min());
  else return T(Element(-__builtin_inff()));
}
template <class T> LK_INLINE T highest_of() {
  using Element = typename element_of<T>::type;
  if constexpr (std::is_integral_v<Element>) return T(std::numeric_limits<Element>::max());
  else return T(Element(__builtin_inff()));
}
#define LK_COMBINATION(Name, neutral_value, result)                       \
  struct Name {                                                           \
    template <class T> static LK_INLINE T neutral() { return T(neutral_value); } \
    template <class T> static LK_INLINE T of(T a, T b) { return T(result); }     \
  };
LK_COMBINATION(Sum, 0, a + b)
LK_COMBINATION(Product, 1, a * b)
LK_COMBINATION(Largest, lowest_of<T>(), max(a, b))
LK_COMBINATION(Smallest, highest_of<T>(), min(a, b))
LK_COMBINATION(Conjunction, ~T(0), a & b)
LK_COMBINATION(Disjunction, 0, a | b)
LK_COMBINATION(Parity, 0, a ^ b)
#undef LK_COMBINATION

// Neighbours first, then pairs of them, and so on: the order of a butterfly over lane distances 1, 2, 4, 8, 16.
template <class T, class Combination> LK_OPAQUE void combine_lanes(const char* slots, uint32_t mask, void* result) {
  T values[kLanes];
  for (uint lane = 0; lane < kLanes; lane++)
    values[lane] = mask >> lane & 1 ? Brought<T>::read(slots + lane * kSlotBytes) : Combination::template neutral<T>();
  for (uint left = kLanes / 2; left > 0; left /= 2)
    for (uint pair = 0; pair < left; pair++) values[pair] = Combination::of(values[2 * pair], values[2 * pair + 1]);
  __builtin_memcpy(result, values, sizeof(T));
}
template <class Combination, class T> LK_INLINE T combine_all(T mine, int line) {
  return Brought<T>(mine, lk::kReduce, line, combine_lanes<T, Combination>).combined();
}
template <class T> LK_INLINE T simd_sum(T mine, LK_CALLER_LINE) { return combine_all<Sum>(mine, line_); }
template <class T> LK_INLINE T simd_product(T mine, LK_CALLER_LINE) { return combine_all<Product>(mine, line_); }
template <class T> LK_INLINE T simd_max(T mine, LK_CALLER_LINE) { return combine_all<Largest>(mine, line_); }
template <class T> LK_INLINE T simd_min(T mine, LK_CALLER_LINE) { return combine_all<Smallest>(mine, line_); }
template <class T> LK_INLINE T simd_and(T mine, LK_CALLER_LINE) { return combine_all<Conjunction>(mine, line_); }
template <class T> LK_INLINE T simd_or(T mine, LK_CALLER_LINE) { return combine_all<Disjunction>(mine, line_); }
template <class T> LK_INLINE T simd_xor(T mine, LK_CALLER_LINE) { return combine_all<Parity>(mine, line_); }

// Over the active lanes below this one, from the first on; inclusive ones with this lane's value.
template <class Combination, class T> LK_INLINE T combine_before(T mine, bool inclusive, int line) {
  Brought<T> values(mine, lk::kPrefix, line);
  T total = Combination::template neutral<T>();
  for (uint lane = 0; lane < values.me() + inclusive; lane++)
    if (values.is_active(lane)) total = Combination::of(total, values.by(lane));
  return total;
}
template <class T> LK_INLINE T simd_prefix_inclusive_sum(T mine, LK_CALLER_LINE) { return combine_before<Sum>(mine, true, line_); }
template <class T> LK_INLINE T simd_prefix_exclusive_sum(T mine, LK_CALLER_LINE) { return combine_before<Sum>(mine, false, line_); }
template <class T> LK_INLINE T simd_prefix_inclusive_product(T mine, LK_CALLER_LINE) { return combine_before<Product>(mine, true, line_); }
template <class T> LK_INLINE T simd_prefix_exclusive_product(T mine, LK_CALLER_LINE) { return combine_before<Product>(mine, false, line_); }

// ------------------------------------------------------------------ one lane's value
#define LK_TAKES(name, operation, source)                                    \
  template <class T> LK_INLINE T name(T mine, ushort given, LK_CALLER_LINE) { \
    Brought<T> values(mine, operation, line_);                               \
    uint me = values.me(), other = given;                                    \
    return values.by(source);                                                \
  }
LK_TAKES(simd_shuffle, lk::kShuffle, (void(me), other))
LK_TAKES(simd_broadcast, lk::kBroadcast, (void(me), other))
LK_TAKES(simd_shuffle_xor, lk::kShuffleXor, me ^ other)
LK_TAKES(quad_broadcast, lk::kBroadcast, me / 4 * 4 + other % 4)
LK_TAKES(simd_shuffle_rotate_down, lk::kShuffleDown, me + other)
LK_TAKES(simd_shuffle_rotate_up, lk::kShuffleUp, me - other)
// A lane whose source lies beyond the edge keeps its own value.
LK_TAKES(simd_shuffle_down, lk::kShuffleDown, me + other < kLanes ? me + other : me)
LK_TAKES(simd_shuffle_up, lk::kShuffleUp, me >= other ? me - other : me)
#undef LK_TAKES
template <class T> LK_INLINE T quad_shuffle_xor(T mine, ushort mask, LK_CALLER_LINE) { return simd_shuffle_xor(mine, mask % 4, line_); }
template <class T> LK_INLINE T simd_broadcast_first(T mine, LK_CALLER_LINE) {
  Brought<T> values(mine, lk::kBroadcast, line_);
  return values.by(values.first_active());
}

// As if two simdgroups lay beside each other, one with the values and one with what fills up.
template <class T> struct Filled { T value, filling; };
template <class T> LK_INLINE T simd_shuffle_and_fill_up(T mine, T filling, ushort delta, LK_CALLER_LINE) {
  Brought<Filled<T>> pairs({mine, filling}, lk::kFill, line_);
  Filled<T> pair = pairs.by(pairs.me() - delta);
  return delta > pairs.me() ? pair.filling : pair.value;
}
template <class T> LK_INLINE T simd_shuffle_and_fill_down(T mine, T filling, ushort delta, LK_CALLER_LINE) {
  Brought<Filled<T>> pairs({mine, filling}, lk::kFill, line_);
  Filled<T> pair = pairs.by(pairs.me() + delta);
  return pairs.me() + delta >= kLanes ? pair.filling : pair.value;
}

// ------------------------------------------------------------------ votes
struct simd_vote {
  using vote_t = uint64_t;
  vote_t lanes;  // bit i: lane i
  LK_INLINE explicit operator vote_t() const { return lanes; }
  LK_INLINE bool any() const { return lanes > 0; }
  LK_INLINE bool all() const { return uint32_t(~lanes) == 0; }
};
LK_INLINE simd_vote simd_ballot(bool mine, LK_CALLER_LINE) {
  Brought<bool> votes(mine, lk::kVote, line_);
  uint64_t lanes = 0;
  for (uint lane = 0; lane < kLanes; lane++)
    if (votes.is_active(lane)) lanes |= uint64_t(votes.by(lane)) << lane;
  return {lanes};
}
LK_INLINE simd_vote simd_active_threads_mask(LK_CALLER_LINE) { return {Brought<bool>(true, lk::kVote, line_).all.mask}; }
LK_INLINE bool simd_is_first(LK_CALLER_LINE) {
  Brought<bool> votes(true, lk::kVote, line_);
  return votes.first_active() == votes.me();
}
LK_INLINE bool simd_any(bool mine, LK_CALLER_LINE) { return combine_all<Disjunction>(uint(mine), line_) == 1; }
LK_INLINE bool simd_all(bool mine, LK_CALLER_LINE) { return combine_all<Conjunction>(uint(mine), line_) == 1; }

// ------------------------------------------------------------------ groups of four lanes
template <class Combination, class T> LK_INLINE T combine_quad(T mine, int line) {
  mine = Combination::of(mine, simd_shuffle_xor(mine, 1, line));
  return Combination::of(mine, simd_shuffle_xor(mine, 2, line));
}
template <class T> LK_INLINE T quad_sum(T mine, LK_CALLER_LINE) { return combine_quad<Sum>(mine, line_); }
template <class T> LK_INLINE T quad_max(T mine, LK_CALLER_LINE) { return combine_quad<Largest>(mine, line_); }
template <class T> LK_INLINE T quad_min(T mine, LK_CALLER_LINE) { return combine_quad<Smallest>(mine, line_); }

}  // namespace metal
