// One row of activations times rows of packed weights, by the tensor core (16-bit floats, CUDA): `FewRowsByTensor`'s contract for
// M = 1, made for the time that the weights take to arrive. A simdgroup requests all that it will ever read of a task before it
// multiplies anything, and no threadgroup waits for sums of x: the tensor core makes them on the way.

//@provides zero_behind
// Zero, which the compiler cannot know: what needs it waits for `all`. NVIDIA's assembler moves reads down to where their values
// are used, to save registers, and each then waits for memory in its turn.
METAL_FUNC uint zero_behind(uint all) {
#if defined(__CUDACC__)
  uint zero;
  asm volatile("{\n .reg .u32 next;\n add.u32 next, %1, 1;\n mul.lo.u32 next, next, %1;\n and.b32 %0, next, 1;\n}" : "=r"(zero) : "r"(all));
  return zero;
#else
  return 0;
#endif
}

//@provides OneRowByTensor
// A tile has 16 rows of weights, 16 / PARTS of each of PARTS matrices, and a task is up to UNROLL steps of 64 bytes of them in one
// slot. The weights are the tensor core's operand of 16 rows, as in `FewRowsByTensor`. Column n of the other operand is the task's
// segment n of x, within one group, zeros elsewhere: step s of the weights has its sums in the columns of its own segments, what
// it leaves in others is dropped. So lane (r, c) has the sums of segments 2c and 2c + 1 for rows r and r + 8, and scales no others.
// Ones instead of weights give the sums of x, for the offsets and the biases.
template <class T, int BITS, int GROUP, int K, int N, bool ROUTED, int SLOTS, int PARTS, int SIMDS, int UNROLL,
          class Where = InDevice<T>>
struct OneRowByTensor {
  using X = typename Where::Row;
  static constexpr constant uint COLUMNS = 16 / PARTS;                                  // of each part
  static constexpr constant uint ROW = uint(K) * BITS / 8;                              // bytes
  static constexpr constant uint GROUP_BYTES = GROUP * BITS / 8, GROUPS = K / GROUP;
  static constexpr constant uint SEGMENT = GROUP_BYTES < 64 ? GROUP_BYTES : 64;         // bytes of one group in one step
  static constexpr constant uint PER_STEP = 64 / SEGMENT, SEGMENTS = UNROLL * PER_STEP;  // of a step, of a task
  static constexpr constant uint PER_SLOT = (ROW + 64 * UNROLL - 1) / (64 * UNROLL), TASKS = SLOTS * PER_SLOT;
  static constexpr constant bool WHOLE = ROW % (64 * UNROLL) == 0;                       // no step lies outside
  static constexpr constant int MEMORY = 16 * SIMDS;
  static_assert(SEGMENTS <= 8, "a task has a column for each of its segments");

  // Of `steps` from a task's first on: this lane's column of x, and the sixteen bytes of each step of its two rows.
  uint4 columns[4], words[UNROLL][2];
  T scales[2][2], biases[2][2];  // of rows r and r + 8, segments 2c and 2c + 1

  static METAL_FUNC bool inside(uint byte) { return WHOLE || byte < ROW; }

  METAL_FUNC void request_weights(thread const WeightRows<T>* parts, size_t matrix, uint begin, uint lane) {
    uint r = lane / 4, c = lane % 4;
#pragma unroll
    for (uint h = 0; h < 2; h++) {
      uint part = h * PARTS / 2;
      size_t row = matrix * N + min(parts[part].first + r + (PARTS == 1 ? 8 * h : 0), uint(N - 1));
#pragma unroll
      for (uint s = 0; s < UNROLL; s++) {
        uint byte = begin + 64 * s + 16 * c;
        words[s][h] = load16_stream((const device uint4*)parts[part].w + (row * ROW + byte) / 16, inside(byte));
      }
#pragma unroll
      for (uint i = 0; i < 2; i++) {
        uint segment = 2 * c + i, byte = begin + segment * SEGMENT;
        bool real = segment < SEGMENTS && inside(byte);
        scales[h][i] = real ? parts[part].scales[row * GROUPS + byte / GROUP_BYTES] : static_cast<T>(0.0f);
        biases[h][i] = real ? parts[part].biases[row * GROUPS + byte / GROUP_BYTES] : static_cast<T>(0.0f);
      }
    }
  }

  METAL_FUNC void request_x(X x, uint begin, uint lane) {
    uint r = lane / 4, c = lane % 4, byte = begin + r / PER_STEP * 64 + 16 * c;
    bool mine = r < SEGMENTS && 16 * c / SEGMENT == r % PER_STEP && inside(byte);
#pragma unroll
    for (uint j = 0; j < 4; j++) {
      X from = x + (byte + 4 * j) * 8 / BITS;
      if (BITS == 4) {
        columns[j] = Where::load16(from, mine);
      } else {
        uint2 pairs = Where::load8(from, mine);
        columns[j] = four_words(pairs.x, pairs.y, 0, 0);
      }
    }
  }

  // x in the order of the weights' nibbles: see `OffsetPairs`.
  METAL_FUNC void arrange_x() {
#pragma unroll
    for (uint j = 0; j < 4; j++) {
      uint4 pairs = columns[j];
      if (BITS == 4) {
        columns[j] = four_words(low_halves(pairs.x, pairs.z), high_halves(pairs.x, pairs.z), low_halves(pairs.y, pairs.w),
                                high_halves(pairs.y, pairs.w));
      } else {
        uint even = low_halves(pairs.x, pairs.y), odd = high_halves(pairs.x, pairs.y);
        columns[j] = four_words(even, even, odd, odd);
      }
    }
  }

  // Of all that was requested.
  METAL_FUNC uint all() const {
    uint all = 0;
#pragma unroll
    for (uint j = 0; j < 4; j++) all ^= columns[j].x ^ columns[j].y ^ columns[j].z ^ columns[j].w;
#pragma unroll
    for (uint h = 0; h < 2; h++) {
#pragma unroll
      for (uint s = 0; s < UNROLL; s++) all ^= words[s][h].x ^ words[s][h].y ^ words[s][h].z ^ words[s][h].w;
      all ^= pack_pair<T>(scales[h][0], scales[h][1]) ^ pack_pair<T>(biases[h][0], biases[h][1]);
    }
    return all;
  }

  // Adds this lane's part of the products of rows r and r + 8, times `weigh`, to `total`.
  METAL_FUNC void multiply(thread float* total, float weigh, uint lane) {
    uint zero = zero_behind(all());
    arrange_x();
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f}, acc[UNROLL][4];
    uint one = pack_pair<T>(static_cast<T>(1.0f), static_cast<T>(1.0f));
#pragma unroll
    for (uint j = 0; j < 4; j++) {
      mma_16x8x16<T>(sums, four_words(one, one, one, one), two_words(columns[j].x, columns[j].y), lane);
      mma_16x8x16<T>(sums, four_words(one, one, one, one), two_words(columns[j].z, columns[j].w), lane);
    }
    columns[0].x |= zero;
#pragma unroll
    for (uint s = 0; s < UNROLL; s++) {
      acc[s][0] = acc[s][1] = acc[s][2] = acc[s][3] = 0.0f;
#pragma unroll
      for (uint j = 0; j < 4; j++) {
        uint4 low = words[s][0], high = words[s][1];
        uint4 top = OffsetPairs<T, BITS>::of(j == 0 ? low.x : j == 1 ? low.y : j == 2 ? low.z : low.w);
        uint4 bottom = OffsetPairs<T, BITS>::of(j == 0 ? high.x : j == 1 ? high.y : j == 2 ? high.z : high.w);
        mma_16x8x16<T>(acc[s], four_words(top.x, bottom.x, top.y, bottom.y), two_words(columns[j].x, columns[j].y), lane);
        mma_16x8x16<T>(acc[s], four_words(top.z, bottom.z, top.w, bottom.w), two_words(columns[j].z, columns[j].w), lane);
      }
    }
#pragma unroll
    for (uint i = 0; i < 2; i++) {
      uint step = (2 * (lane % 4) + i) / PER_STEP;
      float sum = BITS == 4 ? sums[i] : 0.5f * sums[i];  // of eight bits, two parts each have met x
#pragma unroll
      for (uint h = 0; h < 2; h++) {
        float dot = acc[0][2 * h + i];
#pragma unroll
        for (uint s = 1; s < UNROLL; s++) dot = select(dot, acc[s][2 * h + i], step == s);
        dot -= OffsetPairs<T, BITS>::OFFSET * sum;
        total[h] += weigh * (static_cast<float>(scales[h][i]) * dot + static_cast<float>(biases[h][i]) * sum);
      }
    }
  }

  // A simdgroup's part of the sums, for `at` behind the next barrier. `memory` holds MEMORY floats.
  static METAL_FUNC void store(thread const float* total, threadgroup float* memory, uint lane, uint simdgroup) {
#pragma unroll
    for (uint h = 0; h < 2; h++) {
      float sum = total[h] + simd_shuffle_xor(total[h], static_cast<ushort>(1));
      sum += simd_shuffle_xor(sum, static_cast<ushort>(2));
      if (lane % 4 == 0) memory[simdgroup * 16 + 8 * h + lane / 4] = sum;
    }
  }

  // All threads call. `at` reads the results after the next barrier.
  static METAL_FUNC void run(thread const WeightRows<T>* parts, X x, uint slot_stride, threadgroup const int* expert,
                             threadgroup const float* factor, threadgroup float* memory, uint lane, uint simdgroup) {
    float total[2] = {0.0f, 0.0f};
#pragma unroll 1
    for (uint first = 0; first < TASKS; first += SIMDS) {
      uint task = first + simdgroup, slot = task / PER_SLOT, begin = task % PER_SLOT * (64 * UNROLL);
      if (TASKS % SIMDS != 0 && task >= TASKS) break;
      OneRowByTensor tile;
      tile.request_weights(parts, ROUTED ? size_t(expert[slot]) : 0, begin, lane);
      tile.request_x(x + slot * slot_stride, begin, lane);
      tile.multiply(total, ROUTED ? factor[slot] : 1.0f, lane);
    }
    store(total, memory, lane, simdgroup);
  }

  static METAL_FUNC float at(threadgroup const float* memory, uint part, uint row, uint) {
    float sum = 0.0f;
    for (int s = 0; s < SIMDS; s++) sum += memory[s * 16 + part * COLUMNS + row];
    return sum;
  }
};
