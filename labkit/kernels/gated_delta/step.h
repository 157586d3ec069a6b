// The decode step of one head: everything between the input projections and the output projection, for up to eight tokens of a row.

//@provides DeltaStep
// By one threadgroup of SIMDGROUPS simdgroups, with MEMORY floats of threadgroup memory, aligned to 16 bytes. The state of WIDTH
// columns at a time is in registers; its read is on the way while the tokens are prepared. `b` is the row, `hv` the value head.
template <class T, int HK, int HV, int DK, int DV, int LANES, int COLS, int SIMDGROUPS, int TOKENS, bool EACH, bool SPANNED, int PITCH,
          int GATE_PITCH, int A_AT, int B_AT, int Z_PITCH, int Z_AT>
struct DeltaStep {
  static constexpr constant int N = DK / LANES;
  static constexpr constant int GROUPS = 32 / LANES;
  static constexpr constant int WIDTH = SIMDGROUPS * GROUPS * COLS;
  static constexpr constant int NK = DK / 32, NV = DV / 32;
  static constexpr constant int CHANNELS = 2 * HK * DK + HV * DV;
  static constexpr constant int MEMORY = TOKENS * (2 * DK + DV + 2);

  template <class A, class B, class Z, class Weight, class ALog, class Bias, class Norm, class Spans>
  static METAL_FUNC void run(const device T* qkv, A a, B b_gate, Z z, const device T* tail, const device float* state, Weight weight,
                             ALog a_log, Bias dt_bias, Norm norm_weight, Spans spans, float eps, device T* out, device float* states,
                             device T* tail_out, int b, int hv, threadgroup float* memory, int lane, int simdgroup) {
    threadgroup float* keys = memory;
    threadgroup float* queries = keys + TOKENS * DK;
    threadgroup float* values = queries + TOKENS * DK;  // then the outputs
    threadgroup float* gates = values + TOKENS * DV;
    int hk = hv / (HV / HK), part = lane % LANES;
    int column = (simdgroup * GROUPS + lane / LANES) * COLS;
    // A dependent read less where every token counts.
    int first = SPANNED ? clamp(int(spans[2 * b]), 0, TOKENS) : 0;
    int last = SPANNED ? clamp(int(spans[2 * b + 1]), first, TOKENS) : TOKENS;
    int q_channel = hk * DK, k_channel = (HK + hk) * DK, v_channel = 2 * HK * DK + hv * DV;
    auto x = qkv + size_t(b) * TOKENS * PITCH;
    auto old_tail = tail + size_t(b) * 3 * CHANNELS;
    auto new_tail = tail_out + size_t(b) * 3 * CHANNELS;
    size_t state_at = size_t(b * HV + hv) * DV * DK;

    float s[COLS * N];
    load_state<DK, LANES, COLS>(state + state_at + size_t(column) * DK, part, s);

    // What the last part needs besides its sums, asked for before anything waits.
    float gate[NV], scale[NV];
    auto gate_rows = z + size_t(b) * TOKENS * Z_PITCH + Z_AT + hv * DV;
    if (simdgroup < TOKENS) {
      load_row<NV>(gate_rows + size_t(simdgroup) * Z_PITCH, lane, gate);
      load_row<NV>(norm_weight, lane, scale);
    }

    // Query, key, value and gates of each token, each by a simdgroup of its own: their reads wait side by side.
    for (int task = simdgroup; task < 4 * TOKENS; task += SIMDGROUPS) {
      int t = task / 4, kind = task % 4;
      if (kind < 2) {
        int channel = kind == 0 ? q_channel : k_channel;
        threadgroup float* row = (kind == 0 ? queries : keys) + t * DK;
        float taps[4 * NK], window[4 * NK], activated[NK];
        conv_weights<NK>(weight + size_t(channel) * 4, lane, taps);
        load_window<NK, 1>(x + channel, old_tail + channel, PITCH, CHANNELS, t, first, last, lane, window);
        conv_silu<NK>(window, window + NK, window + 2 * NK, window + 3 * NK, taps, activated);
        l2_scale<T, NK>(activated, kind == 0 ? metal::precise::rsqrt(float(DK)) : 1.0f);
        for (int i = 0; i < NK; i++) row[lane * NK + i] = activated[i];
      } else if (kind == 2) {
        float taps[4 * NV], window[4 * NV], value[NV];
        conv_weights<NV>(weight + size_t(v_channel) * 4, lane, taps);
        load_window<NV, 1>(x + v_channel, old_tail + v_channel, PITCH, CHANNELS, t, first, last, lane, window);
        conv_silu<NV>(window, window + NV, window + 2 * NV, window + 3 * NV, taps, value);
        for (int i = 0; i < NV; i++) values[t * DV + lane * NV + i] = static_cast<float>(static_cast<T>(value[i]));
      } else if (lane == 0) {
        size_t at = (size_t(b) * TOKENS + t) * GATE_PITCH + hv;
        float log_decay =
            log_decay_of(static_cast<float>(a[at + A_AT]), static_cast<float>(a_log[hv]), static_cast<float>(dt_bias[hv]));
        gates[t * 2] = exp(log_decay);
        gates[t * 2 + 1] = sigmoid_of(static_cast<float>(b_gate[at + B_AT]));
      }
    }
    // By the simdgroups that one token leaves idle.
    if (simdgroup == SIMDGROUPS - 1) {
      store_tail<NV>(x + v_channel, old_tail + v_channel, new_tail + v_channel, PITCH, CHANNELS, first, last, lane);
    }
    if (hv % (HV / HK) == 0 && simdgroup == (2 * SIMDGROUPS - 2) % SIMDGROUPS) {
      store_tail<NK>(x + q_channel, old_tail + q_channel, new_tail + q_channel, PITCH, CHANNELS, first, last, lane);
    }
    if (hv % (HV / HK) == 0 && simdgroup == (3 * SIMDGROUPS - 3) % SIMDGROUPS) {
      store_tail<NK>(x + k_channel, old_tail + k_channel, new_tail + k_channel, PITCH, CHANNELS, first, last, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (int column0 = 0; column0 < DV; column0 += WIDTH) {
      size_t at = size_t(column0 + column) * DK;
      if (column0 > 0) load_state<DK, LANES, COLS>(state + state_at + at, part, s);
      for (int t = 0; t < TOKENS; t++) {
        if (t >= first && t < last) {
          float value[COLS], y[COLS], query[NK], key[NK];
          for (int i = 0; i < NK; i++) {
            query[i] = queries[t * DK + lane * NK + i];
            key[i] = keys[t * DK + lane * NK + i];
          }
          float qk = row_dot<NK>(query, key);
          for (int c = 0; c < COLS; c++) value[c] = values[t * DV + column0 + column + c];
          delta_token<DK, LANES, COLS>(keys + t * DK, queries + t * DK, value, gates[t * 2], gates[t * 2 + 1], qk, part, s, y);
          simdgroup_barrier(mem_flags::mem_threadgroup);  // all lanes have read their values
          if (part == 0) {
            for (int c = 0; c < COLS; c++) values[t * DV + column0 + column + c] = y[c];
          }
        }
        if (EACH) store_state<DK, LANES, COLS>(states + (size_t(b * TOKENS + t) * HV + hv) * DV * DK + at, part, s);
      }
      if (!EACH) store_state<DK, LANES, COLS>(states + state_at + at, part, s);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (int t = simdgroup; t < TOKENS; t += SIMDGROUPS) {
      size_t at = ((size_t(b) * TOKENS + t) * HV + hv) * DV;
      float y[NV];
      // Rounded before the norm, as the scan hands it to `gated_norm`.
      for (int i = 0; i < NV; i++) y[i] = static_cast<float>(static_cast<T>(values[t * DV + lane * NV + i]));
      if (t > simdgroup) load_row<NV>(gate_rows + size_t(t) * Z_PITCH, lane, gate);
      gated_rms_row<NV>(y, gate, scale, eps);
      if (t < first || t >= last) {
        for (int i = 0; i < NV; i++) y[i] = 0.0f;
      }
      store_row<NV>(out + at, lane, y);
    }
  }
};
