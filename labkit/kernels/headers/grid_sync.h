// All threadgroups of a launch wait for each other. Only for launches whose threadgroups all live at once: on CUDA a grid that
// fits the multiprocessors, in the simulator its resident mode. Metal promises no such thing, and is not offered it.

//@provides grid_sync
// All threads call. Behind it everybody sees what anybody wrote to device memory before it. `arrived` is a word that held 0 when
// the launch began, `wanted` the number of threadgroups times the number of calls so far, this one counted.
METAL_FUNC void grid_sync(device uint* arrived, uint wanted, uint thread_) {
#if defined(__CUDACC__)
  // One thread's fence orders what the barrier before it has gathered, and what the barrier behind it lets go.
  __syncthreads();
  if (thread_ == 0) {
    __threadfence();
    atomicAdd(arrived, 1u);
    // Some ten seconds: an error, where a grid that does not fit would hang the GPU for good.
    for (uint tries = 0; *static_cast<volatile uint*>(arrived) < wanted; tries++) {
      if (tries == 1u << 24) __trap();
    }
    __threadfence();
  }
  __syncthreads();
#else
  threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  if (thread_ == 0) {
    device atomic<uint>* counter = (device atomic<uint>*)arrived;
    atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed);
    while (atomic_load_explicit(counter, memory_order_relaxed) < wanted) {}
  }
  threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
#endif
}

//@provides Grid
// The place of a thread in such a launch, and how often its threadgroups have met.
struct Grid {
  device uint* arrived;
  uint groups, group, thread_, lane, simdgroup, met;
  METAL_FUNC void open(device uint* arrived_, uint groups_, uint group_, uint index, uint lane_, uint simdgroup_) {
    arrived = arrived_, groups = groups_, group = group_, thread_ = index, lane = lane_, simdgroup = simdgroup_, met = 0;
  }
  METAL_FUNC void sync() {
    met++;
    grid_sync(arrived, met * groups, thread_);
  }
};

//@provides prefetch
// Send for `bytes` from `from` on into the GPU's second-level cache, in whole sixteens, and wait for nothing. By one thread. What
// the next stage reads is on its way while the threadgroups wait for each other. Nothing where that is not to be had.
template <class P> METAL_FUNC void prefetch(P from, uint bytes) {
#if defined(__CUDACC__)
  const char* begin = reinterpret_cast<const char*>(from);
  uint before = static_cast<uint>(reinterpret_cast<size_t>(begin) % 16), whole = (before + bytes) / 16 * 16;
  begin -= before;
#if __CUDA_ARCH__ >= 900
  if (whole > 0) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(begin), "r"(whole) : "memory");
#else
  for (uint at = 0; at < whole; at += 128) asm volatile("prefetch.global.L2 [%0];" ::"l"(begin + at));
#endif
#endif
}
