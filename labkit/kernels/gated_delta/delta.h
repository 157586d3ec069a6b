// The gated delta rule, one token at a time, with the state of a head in registers.
//
// A column is one value dimension's row of the state, DK key dimensions long. LANES neighbouring lanes share COLS columns;
// each of them holds N = DK / LANES of every column, in runs of VEC that alternate between the lanes:
// element j * VEC + e of lane `part` is key dimension (j * LANES + part) * VEC + e. Order of sums depends on DK and LANES alone,
// so a token gives the same bits wherever it stands in a call.

//@provides run_length
// Longest run of up to four values of which N consists.
constexpr int run_length(int n) { return n % 4 == 0 ? 4 : (n % 2 == 0 ? 2 : 1); }

//@provides load_state store_state
template <int DK, int LANES, int COLS>
METAL_FUNC void load_state(const device float* columns, uint part, thread float* s) {
  constexpr int N = DK / LANES, VEC = run_length(N);
#pragma unroll
  for (int c = 0; c < COLS; c++) {
#pragma unroll
    for (int j = 0; j < N / VEC; j++) {
      const device float* from = columns + c * DK + (j * LANES + part) * VEC;
      if (VEC == 4) {
        float4 four = *(const device float4*)from;
#pragma unroll
        for (int e = 0; e < 4; e++) s[c * N + j * VEC + (e & (VEC - 1))] = four[e];
      } else {
#pragma unroll
        for (int e = 0; e < VEC; e++) s[c * N + j * VEC + e] = from[e];
      }
    }
  }
}

template <int DK, int LANES, int COLS>
METAL_FUNC void store_state(device float* columns, uint part, const thread float* s) {
  constexpr int N = DK / LANES, VEC = run_length(N);
#pragma unroll
  for (int c = 0; c < COLS; c++) {
#pragma unroll
    for (int j = 0; j < N / VEC; j++) {
      device float* to = columns + c * DK + (j * LANES + part) * VEC;
      if (VEC == 4) {
        float4 four;
#pragma unroll
        for (int e = 0; e < 4; e++) four[e] = s[c * N + j * VEC + (e & (VEC - 1))];
        *(device float4*)to = four;
      } else {
#pragma unroll
        for (int e = 0; e < VEC; e++) to[e] = s[c * N + j * VEC + e];
      }
    }
  }
}

//@provides delta_token
// S <- decay S + delta k^T with delta = beta (v - decay S k), and y = S q, for COLS columns.
// y = decay (S_old q) + delta (k . q), so that both reductions run over the old state, side by side.
template <int DK, int LANES, int COLS>
METAL_FUNC void delta_token(
    const threadgroup float* key, const threadgroup float* query, const thread float* v, float decay, float beta, float qk,
    uint part, thread float* s, thread float* y) {
  constexpr int N = DK / LANES, VEC = run_length(N);
  float k[N], sk[COLS * VEC], sq[COLS * VEC];
#pragma unroll
  for (int i = 0; i < COLS * VEC; i++) sk[i] = sq[i] = 0.0f;
#pragma unroll
  for (int j = 0; j < N / VEC; j++) {
    float q[VEC];
    const threadgroup float* from_k = key + (j * LANES + part) * VEC;
    const threadgroup float* from_q = query + (j * LANES + part) * VEC;
    if (VEC == 4) {
      float4 k4 = *(const threadgroup float4*)from_k, q4 = *(const threadgroup float4*)from_q;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        k[j * VEC + (e & (VEC - 1))] = k4[e];
        q[e & (VEC - 1)] = q4[e];
      }
    } else {
#pragma unroll
      for (int e = 0; e < VEC; e++) {
        k[j * VEC + e] = from_k[e];
        q[e] = from_q[e];
      }
    }
#pragma unroll
    for (int c = 0; c < COLS; c++) {
#pragma unroll
      for (int e = 0; e < VEC; e++) {
        sk[c * VEC + e] = fma(s[c * N + j * VEC + e], k[j * VEC + e], sk[c * VEC + e]);
        sq[c * VEC + e] = fma(s[c * N + j * VEC + e], q[e], sq[c * VEC + e]);
      }
    }
  }
  float along_k[COLS], along_q[COLS];
#pragma unroll
  for (int c = 0; c < COLS; c++) {
    along_k[c] = sk[c * VEC];
    along_q[c] = sq[c * VEC];
#pragma unroll
    for (int e = 1; e < VEC; e++) {
      along_k[c] += sk[c * VEC + e];
      along_q[c] += sq[c * VEC + e];
    }
  }
#pragma unroll
  for (int step = 1; step < LANES; step *= 2) {
#pragma unroll
    for (int c = 0; c < COLS; c++) {
      along_k[c] += simd_shuffle_xor(along_k[c], step);
      along_q[c] += simd_shuffle_xor(along_q[c], step);
    }
  }
#pragma unroll
  for (int c = 0; c < COLS; c++) {
    float delta = beta * fma(-decay, along_k[c], v[c]);
    y[c] = fma(decay, along_q[c], qk * delta);
#pragma unroll
    for (int i = 0; i < N; i++) s[c * N + i] = fma(delta, k[i], decay * s[c * N + i]);
  }
}
