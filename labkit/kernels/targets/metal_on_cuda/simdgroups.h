// What the lanes of a simdgroup do together, and barriers. A simdgroup is a warp.

//@provides mem_flags threadgroup_barrier simdgroup_barrier atomic_thread_fence
namespace metal {
enum class mem_flags { mem_none, mem_device, mem_threadgroup, mem_texture = 4 };
LK_DEVICE mem_flags operator|(mem_flags one, mem_flags other) { return static_cast<mem_flags>(int(one) | int(other)); }
// More than Metal promises: memory of the block is in order whatever the flags.
LK_DEVICE void threadgroup_barrier(mem_flags flags) {
  if (int(flags) & int(mem_flags::mem_device)) __threadfence();
  __syncthreads();
}
LK_DEVICE void simdgroup_barrier(mem_flags) { __syncwarp(LK_LANES); }
template <class... Rest> LK_DEVICE void atomic_thread_fence(mem_flags, Rest...) { __threadfence(); }
}

//@provides lk_word_by_word
namespace metal {
// Warps exchange 4 bytes at a time: anything larger or smaller goes as words.
template <class T, class Exchange> LK_DEVICE T lk_word_by_word(T value, Exchange exchange) {
  uint words[(sizeof(T) + 3) / 4] = {};
  memcpy(words, &value, sizeof(T));
  _Pragma("unroll") for (uint& word : words) word = exchange(word);
  memcpy(&value, words, sizeof(T));
  return value;
}
}

//@provides lk_from simd_shuffle simd_broadcast simd_broadcast_first
namespace metal {
template <class T> LK_DEVICE T lk_from(uint lane, T value) {
  return lk_word_by_word(value, [lane](uint word) { return __shfl_sync(LK_LANES, word, lane); });
}
template <class T> LK_DEVICE T simd_shuffle(T value, ushort lane) { return lk_from(lane, value); }
template <class T> LK_DEVICE T simd_broadcast(T value, ushort lane) { return lk_from(lane, value); }
template <class T> LK_DEVICE T simd_broadcast_first(T value) { return lk_from(__ffs(LK_LANES) - 1, value); }
}

//@provides lk_across simd_shuffle_xor
namespace metal {
template <class T> LK_DEVICE T lk_across(uint distance, T value) {
  return lk_word_by_word(value, [distance](uint word) { return __shfl_xor_sync(LK_LANES, word, distance); });
}
template <class T> LK_DEVICE T simd_shuffle_xor(T value, ushort distance) { return lk_across(distance, value); }
}

//@provides simd_shuffle_up simd_shuffle_down simd_shuffle_rotate_up simd_shuffle_rotate_down simd_shuffle_and_fill_up simd_shuffle_and_fill_down
namespace metal {
template <class T> LK_DEVICE T simd_shuffle_rotate_up(T value, ushort by) { return lk_from((LK_LANE - by) % 32u, value); }
template <class T> LK_DEVICE T simd_shuffle_rotate_down(T value, ushort by) { return lk_from((LK_LANE + by) % 32u, value); }
// A lane without a neighbour that far off keeps its own value, or gets the other one's of the filling.
template <class T> LK_DEVICE T simd_shuffle_up(T value, ushort by) {
  T turned = simd_shuffle_rotate_up(value, by);
  return by <= LK_LANE ? turned : value;
}
template <class T> LK_DEVICE T simd_shuffle_down(T value, ushort by) {
  T turned = simd_shuffle_rotate_down(value, by);
  return by + LK_LANE < 32u ? turned : value;
}
template <class T> LK_DEVICE T simd_shuffle_and_fill_up(T value, T filling, ushort by) {
  T turned = simd_shuffle_rotate_up(value, by), filled = simd_shuffle_rotate_up(filling, by);
  return by <= LK_LANE ? turned : filled;
}
template <class T> LK_DEVICE T simd_shuffle_and_fill_down(T value, T filling, ushort by) {
  T turned = simd_shuffle_rotate_down(value, by), filled = simd_shuffle_rotate_down(filling, by);
  return by + LK_LANE < 32u ? turned : filled;
}
}

//@provides quad_broadcast quad_shuffle_xor quad_sum quad_max quad_min
namespace metal {
template <class T> LK_DEVICE T quad_broadcast(T value, ushort lane) { return lk_from(LK_LANE - LK_LANE % 4u + lane % 4u, value); }
template <class T> LK_DEVICE T quad_shuffle_xor(T value, ushort distance) { return lk_across(distance % 4u, value); }
template <class T, class Join> LK_DEVICE T lk_join_quad(T value, Join join) {
  _Pragma("unroll") for (uint distance = 1; distance <= 2; distance++) value = join(value, lk_across(distance, value));
  return value;
}
template <class T> LK_DEVICE T quad_sum(T value) { return lk_join_quad(value, [](T a, T b) { return T(a + b); }); }
template <class T> LK_DEVICE T quad_max(T value) { return lk_join_quad(value, [](T a, T b) { return a < b ? b : a; }); }
template <class T> LK_DEVICE T quad_min(T value) { return lk_join_quad(value, [](T a, T b) { return b < a ? b : a; }); }
}

//@provides lk_join
namespace metal {
// All lanes present: a butterfly with growing distance, the same order for everybody. Some missing: lane by lane.
template <class T, class Join> LK_DEVICE T lk_join(T value, Join join) {
  if (LK_LANES == ~0u) {
    _Pragma("unroll") for (uint distance = 1; distance < 32; distance += distance) value = join(value, lk_across(distance, value));
    return value;
  }
  uint present = LK_LANES;
  T joined = lk_from(__ffs(present) - 1, value);
  while (present &= present - 1) joined = join(joined, lk_from(__ffs(present) - 1, value));
  return joined;
}
}

//@provides simd_sum simd_product
namespace metal {
template <class T> LK_DEVICE T simd_sum(T value) { return lk_join(value, [](T a, T b) { return T(a + b); }); }
template <> LK_DEVICE int simd_sum(int value) { return __reduce_add_sync(LK_LANES, value); }
template <> LK_DEVICE uint simd_sum(uint value) { return __reduce_add_sync(LK_LANES, value); }
template <class T> LK_DEVICE T simd_product(T value) { return lk_join(value, [](T a, T b) { return T(a * b); }); }
}

//@provides simd_max simd_min
namespace metal {
template <class T> LK_DEVICE T simd_max(T value) { return lk_join(value, [](T a, T b) { return a < b ? b : a; }); }
template <> LK_DEVICE int simd_max(int value) { return __reduce_max_sync(LK_LANES, value); }
template <> LK_DEVICE uint simd_max(uint value) { return __reduce_max_sync(LK_LANES, value); }
template <class T> LK_DEVICE T simd_min(T value) { return lk_join(value, [](T a, T b) { return b < a ? b : a; }); }
template <> LK_DEVICE int simd_min(int value) { return __reduce_min_sync(LK_LANES, value); }
template <> LK_DEVICE uint simd_min(uint value) { return __reduce_min_sync(LK_LANES, value); }
}

//@provides simd_and simd_or simd_xor
namespace metal {
template <class T> LK_DEVICE T simd_and(T value) { return lk_join(value, [](T a, T b) { return T(a & b); }); }
template <class T> LK_DEVICE T simd_or(T value) { return lk_join(value, [](T a, T b) { return T(a | b); }); }
template <class T> LK_DEVICE T simd_xor(T value) { return lk_join(value, [](T a, T b) { return T(a ^ b); }); }
}

//@provides simd_prefix_inclusive_sum simd_prefix_exclusive_sum
namespace metal {
template <class T> LK_DEVICE T simd_prefix_inclusive_sum(T value) {
  _Pragma("unroll") for (uint distance = 1; distance < 32; distance += distance) {
    T before = lk_from((LK_LANE - distance) % 32u, value);
    if (distance <= LK_LANE) value = T(value + before);
  }
  return value;
}
template <class T> LK_DEVICE T simd_prefix_exclusive_sum(T value) {
  T before = lk_from((LK_LANE - 1) % 32u, simd_prefix_inclusive_sum(value));
  return LK_LANE == 0 ? T(0) : before;
}
}

//@provides simd_vote simd_ballot simd_any simd_all simd_is_first simd_active_threads_mask
namespace metal {
struct simd_vote {
  using vote_t = unsigned long;
  vote_t lanes;
  LK_DEVICE explicit operator vote_t() const { return lanes; }
  LK_DEVICE explicit operator unsigned long long() const { return lanes; }
  LK_DEVICE bool any() const { return lanes != 0; }
  LK_DEVICE bool all() const { return uint(lanes) == ~0u; }
};
LK_DEVICE simd_vote simd_active_threads_mask() { return {__activemask()}; }
LK_DEVICE simd_vote simd_ballot(bool yes) { return {__ballot_sync(LK_LANES, yes)}; }
LK_DEVICE bool simd_all(bool yes) { return __all_sync(LK_LANES, yes); }
LK_DEVICE bool simd_any(bool yes) { return __any_sync(LK_LANES, yes); }
LK_DEVICE bool simd_is_first() { return LK_LANE + 1 == __ffs(LK_LANES); }
}
