// Reductions over all threads of a threadgroup. `partial` is threadgroup memory of 32 values that nobody else uses until the
// next barrier; every thread must call, and every thread gets the result.

//@provides threadgroup_sum
template <int THREADS>
METAL_FUNC float threadgroup_sum(float value, threadgroup float* partial, uint lane, uint simdgroup) {
  value = simd_sum(value);
  if (THREADS <= 32) return value;
  if (lane == 0) partial[simdgroup] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < THREADS / 32 ? partial[lane] : 0.0f);
}

//@provides threadgroup_max
template <int THREADS>
METAL_FUNC float threadgroup_max(float value, threadgroup float* partial, uint lane, uint simdgroup) {
  value = simd_max(value);
  if (THREADS <= 32) return value;
  if (lane == 0) partial[simdgroup] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_max(lane < THREADS / 32 ? partial[lane] : -INFINITY);
}

//@provides threadgroup_min_uint
template <int THREADS>
METAL_FUNC uint threadgroup_min_uint(uint value, threadgroup uint* partial, uint lane, uint simdgroup) {
  value = simd_min(value);
  if (THREADS <= 32) return value;
  if (lane == 0) partial[simdgroup] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_min(lane < THREADS / 32 ? partial[lane] : 0xFFFFFFFFu);
}
