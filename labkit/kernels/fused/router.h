// The norm before a sparse MLP, and its router's scores.

//@provides AddedRow
// A row of the residual stream, x + residual, in the registers of a threadgroup: thread t holds its values t, t + THREADS, ...
// T is the type of its norm.
template <class T, int D, int THREADS> struct AddedRow {
  static constexpr constant int VALUES = (D + THREADS - 1) / THREADS;
  float h[VALUES], weights[VALUES];

  // All reads at once. Behind a write that might be to what it reads, a read waits for its turn.
  template <class X, class Residual, class Weight> METAL_FUNC void load(X x, Residual residual, Weight weight, uint t) {
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      uint d = t + i * THREADS;
      h[i] = d < D ? static_cast<float>(x[d]) + static_cast<float>(residual[d]) : 0.0f;
      weights[i] = d < D ? static_cast<float>(weight[d]) : 0.0f;
    }
  }

  // The thread's share of the sum of squares. The sum is rounded before it is squared, as a separate add would leave it; it goes
  // to `hidden` if wanted.
  template <class R> METAL_FUNC float add(device R* hidden, bool wanted, uint t) {
    float sum = 0.0f;
    for (int i = 0; i < VALUES; i++) {
      uint d = t + i * THREADS;
      R rounded = static_cast<R>(h[i]);
      h[i] = static_cast<float>(rounded);
      sum += h[i] * h[i];
      if (d < D && wanted) hidden[d] = rounded;
    }
    return sum;
  }

  METAL_FUNC T normed(int i, float scale) { return static_cast<T>(h[i] * scale * weights[i]); }
};

//@provides RouterRow
// An expert's row of the router, by one simdgroup: packed words, scales and biases in registers.
template <int D, int BITS, int GROUP> struct RouterRow {
  static constexpr constant uint PACK = 32 / BITS;            // values of a word
  static constexpr constant uint WORDS = D / PACK;            // words of an expert's row
  static constexpr constant int LOADS = (WORDS + 31) / 32;    // words of a lane
  uint word[LOADS];
  float factor[LOADS], offset[LOADS];

  template <class W, class S> METAL_FUNC void load(W router, S scales, S biases, uint expert, bool real, uint lane) {
    for (int i = 0; i < LOADS; i++) {
      uint w = lane + 32 * i;
      bool inside = real && w < WORDS;
      size_t group = size_t(expert) * (D / GROUP) + w * PACK / GROUP;
      word[i] = inside ? router[size_t(expert) * WORDS + w] : 0;
      factor[i] = inside ? static_cast<float>(scales[group]) : 0.0f;
      offset[i] = inside ? static_cast<float>(biases[group]) : 0.0f;
    }
  }

  METAL_FUNC float dot(threadgroup const float* row, bool real, uint lane) {
    float sum = 0.0f;
    for (int i = 0; i < LOADS; i++) {
      uint w = lane + 32 * i;
      if (real && w < WORDS) {
        float products = 0.0f, plain = 0.0f;
        for (uint j = 0; j < PACK; j++) {
          float value = row[w * PACK + j];
          products += value * static_cast<float>((word[i] >> (BITS * j)) & ((1u << BITS) - 1));
          plain += value;
        }
        sum += products * factor[i] + plain * offset[i];
      }
    }
    return simd_sum(sum);
  }
};

//@provides norm_and_score
// The norm of a row, and its scores for experts `first` and the following, one a simdgroup. `row` holds D floats, `partial` 32; the
// sum goes to `hidden` and its norm to `normed` if `written`. All that the router and the norm read is requested before anything
// is summed or written.
template <class T, int D, int BITS, int GROUP, int THREADS, class X, class Residual, class Weight, class W, class S, class R>
METAL_FUNC void norm_and_score(X x, Residual residual, Weight weight, W router, S scales, S biases, float eps, uint first, uint experts,
                               bool written, device R* hidden, device T* normed, device float* logits, threadgroup float* row,
                               threadgroup float* partial, uint t, uint lane, uint simdgroup) {
  uint expert = first + simdgroup;
  bool real = expert < experts;
  RouterRow<D, BITS, GROUP> scores;
  scores.load(router, scales, biases, expert, real, lane);
  AddedRow<T, D, THREADS> added;
  added.load(x, residual, weight, t);
  float sum = threadgroup_sum<THREADS>(added.add(hidden, written, t), partial, lane, simdgroup);
  float scale = metal::precise::rsqrt(sum / D + eps);
  for (int i = 0; i < AddedRow<T, D, THREADS>::VALUES; i++) {
    uint d = t + i * THREADS;
    if (d >= D) break;
    T rounded = added.normed(i, scale);
    row[d] = static_cast<float>(rounded);
    if (written) normed[d] = rounded;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float dot = scores.dot(row, real, lane);
  if (real && lane == 0) logits[expert] = dot;
}
