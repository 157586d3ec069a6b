// The norm before a sparse MLP, and its router's scores.

//@provides AddedRow
// A row of the residual stream, x + residual, in the registers of a threadgroup: thread t holds its values t, t + THREADS, ...
// T is the type of its norm.
template <class T, int D, int THREADS> struct AddedRow {
  static constexpr constant int VALUES = (D + THREADS - 1) / THREADS;
  float h[VALUES], weights[VALUES];

  static METAL_FUNC bool inside(uint d) { return D % THREADS == 0 || d < D; }

  // All reads at once. Behind a write that might be to what it reads, a read waits for its turn.
  template <class X, class Residual, class Weight> METAL_FUNC void load(X x, Residual residual, Weight weight, uint t) {
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
      uint d = t + i * THREADS;
      h[i] = inside(d) ? static_cast<float>(x[d]) + static_cast<float>(residual[d]) : 0.0f;
      weights[i] = inside(d) ? static_cast<float>(weight[d]) : 0.0f;
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
      if (inside(d) && wanted) hidden[d] = rounded;
    }
    return sum;
  }

  METAL_FUNC T normed(int i, float scale) { return static_cast<T>(h[i] * scale * weights[i]); }
};

//@provides RouterRow
// An expert's row of the router, by one simdgroup: packed words in pieces of sixteen bytes, scales and biases, in registers. The
// row that it meets lies in threadgroup memory such that lanes with adjacent pieces read adjacent values: four of each piece
// together, and between those a gap, which spreads what one piece's values are written to over all banks.
template <int D, int BITS, int GROUP> struct RouterRow {
  static constexpr constant uint PER_WORD = 32 / BITS, PER_PIECE = 4 * PER_WORD;             // values
  static constexpr constant uint PIECES = D / PER_PIECE, FOURS = PER_PIECE / 4;              // of a row, of a piece
  static constexpr constant int LOADS = (PIECES + 31) / 32;                                  // pieces of a lane
  static constexpr constant uint PITCH = 4 * PIECES + 32 / FOURS;
  static constexpr constant int MEMORY = FOURS * PITCH;                                      // floats, D + 32 of them
  uint4 words[LOADS];
  float factor[LOADS], offset[LOADS];

  static METAL_FUNC uint place(uint d) { return d / 4 % FOURS * PITCH + d / PER_PIECE * 4 + d % 4; }

  // Lanes behind the last piece read that one, as every read that hangs on nothing is requested sooner; `dot` leaves it out.
  template <class W, class S> METAL_FUNC void load(W router, S scales, S biases, uint expert, uint lane) {
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      uint piece = min(lane + 32 * i, PIECES - 1);
      size_t group = size_t(expert) * (D / GROUP) + piece * PER_PIECE / GROUP;
      words[i] = load16_if((const device uint4*)router + size_t(expert) * PIECES + piece, true);
      factor[i] = static_cast<float>(scales[group]);
      offset[i] = static_cast<float>(biases[group]);
    }
  }

  METAL_FUNC float dot(threadgroup const float* row, uint lane) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      uint piece = lane + 32 * i;
      if (PIECES % 32 != 0 && piece >= PIECES) break;
      float products = 0.0f, plain = 0.0f;
#pragma unroll
      for (uint j = 0; j < 4; j++) {
        float q[PER_WORD];
        unpack_word<BITS>(j == 0 ? words[i].x : j == 1 ? words[i].y : j == 2 ? words[i].z : words[i].w, q);
#pragma unroll
        for (uint k = 0; k < PER_WORD; k += 4) {
          float4 four = *(threadgroup const float4*)(row + (j * PER_WORD + k) / 4 * PITCH + 4 * piece);
          products += four.x * q[k] + four.y * q[k + 1] + four.z * q[k + 2] + four.w * q[k + 3];
          plain += (four.x + four.y) + (four.z + four.w);
        }
      }
      sum += products * factor[i] + plain * offset[i];
    }
    return simd_sum(sum);
  }
};

//@provides norm_and_score
// The norm of a row, and its scores for experts `first` and the following, one a simdgroup. `row` holds `RouterRow::MEMORY` floats,
// aligned to 16 bytes, `partial` 32; the sum goes to `hidden` and its norm to `normed` if `written`. All that the router and the norm
// read is requested before anything is summed or written.
template <class T, int D, int BITS, int GROUP, int THREADS, class X, class Residual, class Weight, class W, class S, class R>
METAL_FUNC void norm_and_score(X x, Residual residual, Weight weight, W router, S scales, S biases, float eps, uint first, uint experts,
                               bool written, device R* hidden, device T* normed, device float* logits, threadgroup float* row,
                               threadgroup float* partial, uint t, uint lane, uint simdgroup) {
  uint expert = first + simdgroup;
  RouterRow<D, BITS, GROUP> scores;
  scores.load(router, scales, biases, min(expert, experts - 1), lane);
  AddedRow<T, D, THREADS> added;
  added.load(x, residual, weight, t);
  float sum = threadgroup_sum<THREADS>(added.add(hidden, written, t), partial, lane, simdgroup);
  float scale = metal::precise::rsqrt(sum / D + eps);
#pragma unroll
  for (int i = 0; i < AddedRow<T, D, THREADS>::VALUES; i++) {
    uint d = t + i * THREADS;
    if (added.inside(d)) {
      T rounded = added.normed(i, scale);
      row[scores.place(d)] = static_cast<float>(rounded);
      if (written) normed[d] = rounded;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float dot = scores.dot(row, lane);
  if (expert < experts && lane == 0) logits[expert] = dot;
}
