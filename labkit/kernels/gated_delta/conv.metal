// A simdgroup takes one head of queries, keys or values through TOKENS tokens: causal convolution, SiLU, L2 norm of queries and
// keys; with a value head go its gates, with the first tokens the new tail.
constexpr int SLOTS = 2 * HK + HV;
constexpr int CHANNELS = 2 * HK * DK + HV * DV;
int lane = thread_index_in_simdgroup;
int slot = threadgroup_position_in_grid.y * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
int b = threadgroup_position_in_grid.z;
int begin = threadgroup_position_in_grid.x * TOKENS;
int first = clamp(int(spans[2 * b]), 0, int(length));
int last = clamp(int(spans[2 * b + 1]), first, int(length));
size_t row = size_t(b) * length;

if (slot < 2 * HK) {
  constexpr int N = DK / 32;
  int channel = slot * DK;
  auto out = slot < HK ? q + (row * HK + slot) * DK : k + (row * HK + slot - HK) * DK;
  float scale = slot < HK ? metal::precise::rsqrt(float(DK)) : 1.0f;
  float x[(TOKENS + 3) * N], taps[4 * N];
  conv_weights<N>(weight + size_t(channel) * 4, lane, taps);
  load_window<N, TOKENS>(
      qkv + row * PITCH + channel, tail + size_t(b) * 3 * CHANNELS + channel, PITCH, CHANNELS, begin, first, last, lane, x);
#pragma unroll
  for (int i = 0; i < TOKENS; i++) {
    int t = begin + i;
    float y[N];
    conv_silu<N>(x + i * N, x + (i + 1) * N, x + (i + 2) * N, x + (i + 3) * N, taps, y);
    l2_scale<T, N>(y, scale);
    if (t < first || t >= last) {
      for (int e = 0; e < N; e++) y[e] = 0.0f;
    }
    if (t < length) store_row<N>(out + size_t(t) * HK * DK, lane, y);
  }
  if (begin == 0) {
    store_tail<N>(
        qkv + row * PITCH + channel, tail + size_t(b) * 3 * CHANNELS + channel,
        tail_out + size_t(b) * 3 * CHANNELS + channel, PITCH, CHANNELS, first, last, lane);
  }
} else {
  constexpr int N = DV / 32;
  int hv = slot - 2 * HK, channel = 2 * HK * DK + hv * DV;
  auto out = v + (row * HV + hv) * DV;
  float x[(TOKENS + 3) * N], taps[4 * N];
  conv_weights<N>(weight + size_t(channel) * 4, lane, taps);
  load_window<N, TOKENS>(
      qkv + row * PITCH + channel, tail + size_t(b) * 3 * CHANNELS + channel, PITCH, CHANNELS, begin, first, last, lane, x);
#pragma unroll
  for (int i = 0; i < TOKENS; i++) {
    int t = begin + i;
    float y[N];
    conv_silu<N>(x + i * N, x + (i + 1) * N, x + (i + 2) * N, x + (i + 3) * N, taps, y);
    if (t < first || t >= last) {
      for (int e = 0; e < N; e++) y[e] = 0.0f;
    }
    if (t < length) store_row<N>(out + size_t(t) * HV * DV, lane, y);
  }
  if (lane < TOKENS && begin + lane < length) {
    size_t at = (row + begin + lane) * HV + hv, from = (row + begin + lane) * GATE_PITCH + hv;
    bool counts = begin + lane >= first && begin + lane < last;
    float decay = log_decay_of(static_cast<float>(a[from + A_AT]), static_cast<float>(a_log[hv]), static_cast<float>(dt_bias[hv]));
    log_decay[at] = counts ? decay : 0.0f;
    beta[at] = counts ? sigmoid_of(static_cast<float>(b_gate[from + B_AT])) : 0.0f;
  }
  if (begin == 0) {
    store_tail<N>(
        qkv + row * PITCH + channel, tail + size_t(b) * 3 * CHANNELS + channel,
        tail_out + size_t(b) * 3 * CHANNELS + channel, PITCH, CHANNELS, first, last, lane);
  }
}
