// Rows that a threadgroup norms for itself before it multiplies them.

//@provides added_at
template <bool ADDS, class X, class Residual> METAL_FUNC float added_at(X x, Residual residual, uint i) {
  return ADDS ? static_cast<float>(x[i]) + static_cast<float>(residual[i]) : static_cast<float>(residual[i]);
}

//@provides NormedRows
// M rows x + residual (unless ADDS residual alone), normed to the bits of `residual_rms_norm`, whose THREADS threads a row these
// SIMDS simdgroups stand in for, one 32 of them after the other. All threads call `sum`, then `scale`: what they request in between
// travels meanwhile, and is not in front of the rows themselves. Norms go to `rows`. `partial` holds 32 floats a row.
template <class T, int D, int M, int THREADS, int SIMDS, bool ADDS, class R> struct NormedRows {
  // A stream that is wider than its norm does not fit where the norm goes: its values are read again, from cache.
  static constexpr constant bool AGAIN = sizeof(R) > sizeof(T);
  static constexpr constant int SHARES = THREADS / 32, VALUES = (D + THREADS - 1) / THREADS, TURNS = (SHARES + SIMDS - 1) / SIMDS;
  float weights[TURNS][VALUES];

  // All that a row is made of is requested before anything is summed.
  template <class X, class Residual, class Weight>
  METAL_FUNC void sum(X x, Residual residual, Weight weight, threadgroup T* rows, threadgroup float* partial, uint lane, uint simdgroup) {
    float h[TURNS][VALUES];
    for (uint m = 0; m < M; m++) {
#pragma unroll
      for (int turn = 0; turn < TURNS; turn++) {
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
          uint share = simdgroup + turn * SIMDS, d = share * 32 + lane + i * THREADS;
          bool inside = share < SHARES && d < D;
          h[turn][i] = inside ? added_at<ADDS>(x, residual, m * D + d) : 0.0f;
          if (m == 0) weights[turn][i] = inside ? static_cast<float>(weight[d]) : 0.0f;
        }
      }
#pragma unroll
      for (int turn = 0; turn < TURNS; turn++) {
        uint share = simdgroup + turn * SIMDS;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
          uint d = share * 32 + lane + i * THREADS;
          // Rounded before it is squared, as a separate add would leave it.
          R rounded = static_cast<R>(h[turn][i]);
          if (!AGAIN && share < SHARES && d < D) rows[m * D + d] = static_cast<T>(rounded);
          float value = static_cast<float>(rounded);
          sum += value * value;
        }
        sum = simd_sum(sum);
        if (lane == 0 && share < SHARES) partial[m * 32 + share] = sum;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  // The sums x + residual go to `hidden` if `written`.
  template <class X, class Residual>
  METAL_FUNC void scale(X x, Residual residual, float eps, bool written, device R* hidden, threadgroup T* rows,
                        threadgroup const float* partial, uint lane, uint simdgroup) {
    for (uint m = 0; m < M; m++) {
      float sum = simd_sum(lane < SHARES ? partial[m * 32 + lane] : 0.0f);
      float scale = metal::precise::rsqrt(sum / D + eps);
#pragma unroll
      for (int turn = 0; turn < TURNS; turn++) {
#pragma unroll
        for (int i = 0; i < VALUES; i++) {
          uint share = simdgroup + turn * SIMDS, d = share * 32 + lane + i * THREADS;
          if (share >= SHARES || d >= D) continue;
          R added = AGAIN ? static_cast<R>(added_at<ADDS>(x, residual, m * D + d)) : static_cast<R>(rows[m * D + d]);
          if (written) hidden[m * D + d] = added;
          rows[m * D + d] = static_cast<T>(static_cast<float>(added) * scale * weights[turn][i]);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
};
