// Rows of a head, N = D / 32 neighbouring values in each lane of a simdgroup: what stands before and behind the scan.

//@provides load_row
// A simdgroup reads a row of 32 * N activations, N neighbours a lane.
template <int N, typename U>
METAL_FUNC void load_row(const device U* row, uint lane, thread float* x) {
  if (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      vec<U, 4> four = *(const device vec<U, 4>*)(row + lane * N + 4 * i);
#pragma unroll
      for (int e = 0; e < 4; e++) x[4 * i + e] = static_cast<float>(four[e]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = static_cast<float>(row[lane * N + i]);
  }
}

//@provides store_row
template <int N, typename T>
METAL_FUNC void store_row(device T* row, uint lane, const thread float* x) {
  if (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
      vec<T, 4> four;
#pragma unroll
      for (int e = 0; e < 4; e++) four[e] = static_cast<T>(x[4 * i + e]);
      *(device vec<T, 4>*)(row + lane * N + 4 * i) = four;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) row[lane * N + i] = static_cast<T>(x[i]);
  }
}

//@provides row_dot
// The dot product of two rows held as `load_row` leaves them.
template <int N>
METAL_FUNC float row_dot(const thread float* a, const thread float* b) {
  float sum = a[0] * b[0];
#pragma unroll
  for (int i = 1; i < N; i++) sum = fma(a[i], b[i], sum);
  return simd_sum(sum);
}

//@provides sigmoid_of
METAL_FUNC float sigmoid_of(float x) { return 1.0f / (1.0f + exp(-x)); }

//@provides log_decay_of
// -exp(A_log) softplus(a + dt_bias): the logarithm of how much of its state a head keeps at a token.
METAL_FUNC float log_decay_of(float a, float a_log, float dt_bias) {
  float x = a + dt_bias;
  float u = exp(-abs(x)), w = 1.0f + u;
  float log1p = w == 1.0f ? u : log(w) * (u / (w - 1.0f));  // Kahan's: right to the last bits where u vanishes beside 1
  return -exp(a_log) * (max(x, 0.0f) + log1p);
}

//@provides l2_scale
// Scale a row to length `scale`, as round(x / sqrt(sum of squares + 1e-6) * scale) in the activations' dtype.
template <typename T, int N>
METAL_FUNC void l2_scale(thread float* x, float scale) {
  float sum = x[0] * x[0];
#pragma unroll
  for (int i = 1; i < N; i++) sum = fma(x[i], x[i], sum);
  float factor = scale * metal::precise::rsqrt(simd_sum(sum) + 1e-6f);
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = static_cast<float>(static_cast<T>(x[i] * factor));
}

//@provides gated_rms_row
// RMSNorm of a row times its weight and silu of its gate.
template <int N>
METAL_FUNC void gated_rms_row(thread float* y, const thread float* z, const thread float* weight, float eps) {
  float sum = y[0] * y[0];
#pragma unroll
  for (int i = 1; i < N; i++) sum = fma(y[i], y[i], sum);
  float scale = metal::precise::rsqrt(simd_sum(sum) / (32 * N) + eps);
#pragma unroll
  for (int i = 0; i < N; i++) y[i] = y[i] * scale * weight[i] * (z[i] * sigmoid_of(z[i]));
}

//@provides conv_weights
// The four taps of each of a lane's N channels.
template <int N, typename U>
METAL_FUNC void conv_weights(const device U* weight, uint lane, thread float* taps) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    vec<U, 4> four = *(const device vec<U, 4>*)(weight + size_t(lane * N + i) * 4);
#pragma unroll
    for (int e = 0; e < 4; e++) taps[4 * i + e] = static_cast<float>(four[e]);
  }
}

//@provides conv_silu
// SiLU of the causal convolution at one token, from its own values and those of the three tokens before it.
template <int N>
METAL_FUNC void conv_silu(
    const thread float* x3, const thread float* x2, const thread float* x1, const thread float* x0,
    const thread float* taps, thread float* out) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    float sum = fma(x0[i], taps[4 * i + 3], fma(x1[i], taps[4 * i + 2], fma(x2[i], taps[4 * i + 1], x3[i] * taps[4 * i])));
    out[i] = sum * sigmoid_of(sum);
  }
}

//@provides load_window
// A lane's channels of tokens begin - 3 to begin + TOKENS - 1. Before the row's first valid token stands its tail; pads are zero.
// Tokens of x lie `pitch` values apart, those of the tail `channels`. Every token is read from somewhere: behind a branch, a read
// would wait for the one before it.
template <int N, int TOKENS, typename U>
METAL_FUNC void load_window(
    const device U* x, const device U* tail, int pitch, int channels, int begin, int first, int last, uint lane,
    thread float* window) {
#pragma unroll
  for (int i = 0; i < TOKENS + 3; i++) {
    int t = begin + i - 3, back = t - first + 3;
    bool valid = t >= first && t < last;
    load_row<N>(valid ? x + size_t(t) * pitch : tail + clamp(back, 0, 2) * channels, lane, window + i * N);
    if (!valid && (back < 0 || back >= 3)) {
#pragma unroll
      for (int e = 0; e < N; e++) window[i * N + e] = 0.0f;
    }
  }
}

//@provides store_tail
// The last three tokens of a row, its old tail counted, for the next call. All are read before one is written.
template <int N, typename U>
METAL_FUNC void store_tail(
    const device U* x, const device U* tail, device U* tail_out, int pitch, int channels, int first, int last, uint lane) {
  float rows[3 * N];
#pragma unroll
  for (int i = 0; i < 3; i++) {
    int t = last - 3 + i;
    load_row<N>(t >= first ? x + size_t(t) * pitch : tail + (t - first + 3) * channels, lane, rows + i * N);
  }
#pragma unroll
  for (int i = 0; i < 3; i++) store_row<N>(tail_out + i * channels, lane, rows + i * N);
}
