// A few rows of activations times rows of packed weights. Decoding waits for weights, so each is read once and its integers
// meet the activations as they are; a group's scale and bias come in after its sum:
//   sum_k x (scale q + bias) = scale sum_k x q + bias sum_k x.
// Two forms of one contract: by lanes (plain arithmetic, any float type) and by the tensor core (16-bit floats, CUDA).
//
// A threadgroup of SIMDS simdgroups computes 16 rows of each of PARTS weight matrices (gate and up, or the next 16 rows of the
// same), for M rows of x. If ROUTED it sums over SLOTS experts: slot i multiplies x + i * slot_stride by expert[i]'s weights and
// weighs the product by factor[i]. Else there is one slot, and neither is read. Rows of x are wherever `Where` says.

//@provides WeightRows
// K x N weights of one matrix (or of every expert's) and the first of the 16 rows wanted. Rows beyond the last repeat it.
template <class S> struct WeightRows {
  const device uint* w;
  const device S* scales;
  const device S* biases;
  uint first;
};

//@provides InDevice
// Where rows of x lie, and how eight or sixteen bytes of them are read: those of other launches, or this threadgroup's own.
template <class T> struct InDevice {
  using Row = const device T*;
  using Four = const device vec<T, 4>*;
  using Sixteen = const device uint4*;
  static METAL_FUNC uint4 load16(Row from, bool wanted) { return load16_if((const device uint4*)from, wanted); }
  static METAL_FUNC uint2 load8(Row from, bool wanted) { return load8_if((const device uint2*)from, wanted); }
};

//@provides InThreadgroup
template <class T> struct InThreadgroup {
  using Row = threadgroup const T*;
  using Four = threadgroup const vec<T, 4>*;
  using Sixteen = threadgroup const uint4*;
  static METAL_FUNC uint4 load16(Row from, bool wanted) { return wanted ? *(threadgroup const uint4*)from : four_words(0, 0, 0, 0); }
  static METAL_FUNC uint2 load8(Row from, bool wanted) { return wanted ? *(threadgroup const uint2*)from : two_words(0, 0); }
};

//@provides FewRowsByLanes
template <class T, class S, int M, int BITS, int GROUP, int K, int N, bool ROUTED, int SLOTS, int PARTS, int SIMDS,
          class Where = InDevice<T>>
struct FewRowsByLanes {
  using X = typename Where::Row;
  static constexpr constant uint COLUMNS = 16;              // of each part
  static constexpr constant uint ROW = uint(K) * BITS / 8;  // bytes
  static constexpr constant uint GROUPS = K / GROUP;
  static constexpr constant int PER_WORD = 32 / BITS;
  static constexpr constant int ROWS = 16 / SIMDS;  // of a simdgroup, in each part
  static constexpr constant int MEMORY = PARTS * 16 * M;

  // All threads call. `memory` holds MEMORY floats; `at` reads the results after the next barrier.
  static METAL_FUNC void run(thread const WeightRows<S>* parts, X x, uint slot_stride, threadgroup const int* expert,
                             threadgroup const float* factor, threadgroup float* memory, uint lane, uint simdgroup) {
    float total[PARTS][ROWS][M];
    for (int p = 0; p < PARTS; p++)
      for (int r = 0; r < ROWS; r++)
        for (int m = 0; m < M; m++) total[p][r][m] = 0.0f;
    // The lanes walk through the rows of all slots as if they were one.
    for (uint start = 0; start < SLOTS * ROW; start += 512) {
      uint position = start + 16 * lane;
      bool inside = position < SLOTS * ROW;
      uint slot = inside ? position / ROW : 0, byte = inside ? position % ROW : 0;
      size_t base = ROUTED ? size_t(expert[slot]) * N : 0;
      uint4 words[PARTS][ROWS];
      float scale[PARTS][ROWS], bias[PARTS][ROWS];
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          size_t row = base + min(parts[p].first + simdgroup * ROWS + r, uint(N - 1));
          words[p][r] = load16_stream((const device uint4*)parts[p].w + (row * ROW + byte) / 16);
          size_t group = row * GROUPS + byte * 8 / (BITS * GROUP);
          scale[p][r] = static_cast<float>(parts[p].scales[group]);
          bias[p][r] = static_cast<float>(parts[p].biases[group]);
        }
      }
      float weigh = !inside ? 0.0f : ROUTED ? factor[slot] : 1.0f;
      float dots[PARTS][ROWS][M], sums[M];
      for (int m = 0; m < M; m++) {
        sums[m] = 0.0f;
        for (int p = 0; p < PARTS; p++)
          for (int r = 0; r < ROWS; r++) dots[p][r][m] = 0.0f;
      }
      X mine = x + slot * slot_stride + byte * 8 / BITS;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float values[M][PER_WORD];
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
          for (int i = 0; i < PER_WORD; i += 4) {
            vec<T, 4> four = *(typename Where::Four)(mine + size_t(m) * K + j * PER_WORD + i);
            values[m][i] = static_cast<float>(four.x), values[m][i + 1] = static_cast<float>(four.y);
            values[m][i + 2] = static_cast<float>(four.z), values[m][i + 3] = static_cast<float>(four.w);
            sums[m] += (values[m][i] + values[m][i + 1]) + (values[m][i + 2] + values[m][i + 3]);
          }
        }
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
#pragma unroll
          for (int r = 0; r < ROWS; r++) {
            float q[PER_WORD];
            uint4 w = words[p][r];
            unpack_word<BITS>(j == 0 ? w.x : j == 1 ? w.y : j == 2 ? w.z : w.w, q);
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
              for (int i = 0; i < PER_WORD; i++) dots[p][r][m] += values[m][i] * q[i];
            }
          }
        }
      }
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
          for (int m = 0; m < M; m++) total[p][r][m] += weigh * (scale[p][r] * dots[p][r][m] + bias[p][r] * sums[m]);
        }
      }
    }
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int m = 0; m < M; m++) {
          float sum = simd_sum(total[p][r][m]);
          if (lane == 0) memory[(p * 16 + simdgroup * ROWS + r) * M + m] = sum;
        }
      }
    }
  }

  static METAL_FUNC float at(threadgroup const float* memory, uint part, uint row, uint m) {
    return memory[(part * 16 + row) * M + m];
  }
};

//@provides FewRowsByTensor
// The weights are the 16-row operand of the tensor core, as nibbles with an offset. Four lanes share a row and 64 bytes of it at
// a time, more than a group may hold: so each column of the other operand holds one row of x within one group, zeros elsewhere,
// and 8 columns serve M rows times the groups of a step.
template <class T, int M, int BITS, int GROUP, int K, int N, bool ROUTED, int SLOTS, int PARTS, int SIMDS, int UNROLL,
          class Where = InDevice<T>>
struct FewRowsByTensor {
  using X = typename Where::Row;
  static constexpr constant uint COLUMNS = 16;                                                   // of each part
  static constexpr constant uint ROW = uint(K) * BITS / 8;                                       // bytes
  static constexpr constant uint GROUP_BYTES = GROUP * BITS / 8;
  static constexpr constant uint GROUPS = K / GROUP;
  static constexpr constant uint SEGMENT = GROUP_BYTES < 64 ? GROUP_BYTES : 64;                  // bytes of one group in one step
  static constexpr constant uint PER_STEP = 64 / SEGMENT;                                        // segments of a step: 1, 2 or 4
  static constexpr constant uint SEGMENTS = ROW / SEGMENT;                                       // of a row
  static constexpr constant uint VALUES = SEGMENT * 8 / BITS;                                    // of x in a segment
  static constexpr constant uint ROW_STEPS = (ROW + 63) / 64;
  static constexpr constant uint STEPS = SLOTS * ROW_STEPS;
  static constexpr constant uint SLICE = (STEPS + SIMDS - 1) / SIMDS;                            // steps of a simdgroup
  static constexpr constant bool WHOLE = ROW % 64 == 0 && STEPS % (SIMDS * UNROLL) == 0;         // no step lies outside
  static constexpr constant int TILES = (M * PER_STEP + 7) / 8;                                  // tensor tiles of 8 columns
  static constexpr constant bool PAIRS = GROUPS % 2 == 0;                                        // scales of a row are whole words
  using Reads = LaneReads<UNROLL * PARTS * 2, PAIRS ? UNROLL * PARTS * 4 : 0, (SLICE > UNROLL ? 2 : 1)>;
  static constexpr constant uint SUMS = SLOTS * M * SEGMENTS;
  static constexpr constant int MEMORY = SUMS + SIMDS * PARTS * 16 * M;

  struct Chunk {  // what UNROLL steps read; of scales and biases a pair, for this lane's two columns of results
    uint4 words[UNROLL][PARTS][2];
    uint scales[UNROLL][PARTS][2], biases[UNROLL][PARTS][2];
  };

  // The group of a row that holds a lane's first result of a step.
  static METAL_FUNC uint group_of(uint in_row, uint c) {
    return (in_row * PER_STEP + 2 * c % PER_STEP) * SEGMENT / GROUP_BYTES;
  }

  static METAL_FUNC uint pair_of(const device T* groups, size_t row, uint in_row, uint c, bool inside) {
    uint segment = in_row * PER_STEP + 2 * c % PER_STEP;
    T low = static_cast<T>(0.0f), high = low;
    if (WHOLE || (inside && segment < SEGMENTS)) low = groups[row * GROUPS + group_of(in_row, c)];
    if (PER_STEP == 1) high = low;
    else if (WHOLE || (inside && segment + 1 < SEGMENTS)) high = groups[row * GROUPS + group_of(in_row, c) + 1];
    return pack_pair<T>(low, high);
  }

  // Send for batch `batch`, the steps from `first` on.
  static METAL_FUNC void send(thread Reads& reads, uint batch, thread const WeightRows<T>* parts, threadgroup const int* expert,
                              uint first, uint end, uint lane) {
    uint r = lane / 4, c = lane % 4;
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      uint step = first + u, in_row = step % ROW_STEPS, byte = in_row * 64 + 16 * c;
      bool inside = WHOLE || step < end, holds = WHOLE || (inside && byte < ROW);
      bool grouped = WHOLE || (inside && in_row * PER_STEP + 2 * c % PER_STEP < SEGMENTS);
      size_t base = ROUTED && inside ? size_t(expert[step / ROW_STEPS]) * N : 0;
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          int i = (u * PARTS + p) * 2 + h;
          size_t row = base + min(parts[p].first + r + 8 * h, uint(N - 1));
          reads.send16(batch, i, (const device uint4*)parts[p].w + (row * ROW + byte) / 16, holds);
          if (PAIRS) {
            size_t pair = (row * GROUPS + group_of(in_row, c)) / 2;
            reads.send4(batch, 2 * i, (const device uint*)parts[p].scales + pair, grouped);
            reads.send4(batch, 2 * i + 1, (const device uint*)parts[p].biases + pair, grouped);
          }
        }
      }
    }
  }

  // A pair of groups as sent for; where a step has one group, that one twice.
  static METAL_FUNC uint twice(uint pair, uint group) {
    if (PER_STEP > 1) return pair;
    return group % 2 ? high_halves(pair, pair) : low_halves(pair, pair);
  }

  // What was sent for, once it has arrived.
  static METAL_FUNC void take(thread Chunk& chunk, thread Reads& reads, uint batch, thread const WeightRows<T>* parts,
                              threadgroup const int* expert, uint first, uint end, uint lane) {
    uint r = lane / 4, c = lane % 4;
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      uint step = first + u, in_row = step % ROW_STEPS;
      bool inside = WHOLE || step < end;
      size_t base = ROUTED && !PAIRS && inside ? size_t(expert[step / ROW_STEPS]) * N : 0;
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          int i = (u * PARTS + p) * 2 + h;
          chunk.words[u][p][h] = reads.get16(batch, i);
          if (PAIRS) {
            chunk.scales[u][p][h] = twice(reads.get4(batch, 2 * i), group_of(in_row, c));
            chunk.biases[u][p][h] = twice(reads.get4(batch, 2 * i + 1), group_of(in_row, c));
          } else {
            size_t row = base + min(parts[p].first + r + 8 * h, uint(N - 1));
            chunk.scales[u][p][h] = pair_of(parts[p].scales, row, in_row, c, inside);
            chunk.biases[u][p][h] = pair_of(parts[p].biases, row, in_row, c, inside);
          }
        }
      }
    }
  }

  // Sums of x over each segment, for the offsets and the biases: eight values a thread at a time.
  static METAL_FUNC void sum_segments(X x, uint slot_stride, threadgroup float* sums, uint thread_) {
    constexpr uint LANES = VALUES / 8, ALL = SUMS * LANES;
    for (uint start = 0; start < ALL; start += 32 * SIMDS) {
      uint item = start + thread_, segment = item / LANES;
      float sum = 0.0f;
      if (item < ALL) {
        uint slot = segment / (M * SEGMENTS), m = segment / SEGMENTS % M;
        uint4 pairs = *(typename Where::Sixteen)(x + slot * slot_stride + size_t(m) * K + segment % SEGMENTS * VALUES + item % LANES * 8);
        sum = (float_low<T>(pairs.x) + float_high<T>(pairs.x)) + (float_low<T>(pairs.y) + float_high<T>(pairs.y)) +
              (float_low<T>(pairs.z) + float_high<T>(pairs.z)) + (float_low<T>(pairs.w) + float_high<T>(pairs.w));
      }
      for (uint distance = 1; distance < LANES; distance *= 2) sum += simd_shuffle_xor(sum, static_cast<ushort>(distance));
      if (item < ALL && item % LANES == 0) sums[segment] = sum;
    }
  }

  // All threads call. `memory` holds MEMORY floats, aligned to 16 bytes; `at` reads the results after the next barrier.
  static METAL_FUNC void run(thread const WeightRows<T>* parts, X x, uint slot_stride, threadgroup const int* expert,
                             threadgroup const float* factor, threadgroup float* memory, uint lane, uint simdgroup) {
    uint r = lane / 4, c = lane % 4;
    uint end = min((simdgroup + 1) * SLICE, STEPS);
    Reads reads;
    send(reads, 0, parts, expert, simdgroup * SLICE, end, lane);
    sum_segments(x, slot_stride, memory, simdgroup * 32 + lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float total[PARTS][TILES][4];
    for (int p = 0; p < PARTS; p++)
      for (int t = 0; t < TILES; t++)
        for (int i = 0; i < 4; i++) total[p][t][i] = 0.0f;
#pragma unroll 1
    for (uint batch = 0; batch * UNROLL < SLICE; batch++) {
      uint first = simdgroup * SLICE + batch * UNROLL;
      if (SLICE > UNROLL && (batch + 1) * UNROLL < SLICE) send(reads, batch + 1, parts, expert, first + UNROLL, end, lane);
      Chunk chunk;
      take(chunk, reads, batch, parts, expert, first, end, lane);
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        uint step = first + u;
        bool inside = WHOLE || step < end;
        uint slot = ROUTED && inside ? step / ROW_STEPS : 0, in_row = inside ? step % ROW_STEPS : 0;
        add_step(total, chunk, u, x + slot * slot_stride, memory + slot * M * SEGMENTS, ROUTED ? factor[slot] : 1.0f, inside, in_row,
                 r, c, lane);
      }
    }
    threadgroup float* mine = memory + SUMS + simdgroup * (PARTS * 16 * M);
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
      for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (uint h = 0; h < 2; h++) {
          float one = total[p][t][2 * h], two = total[p][t][2 * h + 1];
          threadgroup float* row = mine + (p * 16 + r + 8 * h) * M;
          if (PER_STEP == 1) {
            if (8 * t + 2 * c < M) row[8 * t + 2 * c] = one;
            if (8 * t + 2 * c + 1 < M) row[8 * t + 2 * c + 1] = two;
          } else {
            float sum = one + two;
            if (PER_STEP == 4) sum += simd_shuffle_xor(sum, static_cast<ushort>(1));
            uint m = (8 * t + 2 * c) / PER_STEP;
            if (m < M && (2 * c) % PER_STEP == 0) row[m] = sum;
          }
        }
      }
    }
  }

  static METAL_FUNC void add_step(thread float (*total)[TILES][4], thread const Chunk& chunk, int u, X x,
                                  threadgroup const float* sums, float weigh, bool inside, uint in_row, uint r, uint c, uint lane) {
    float acc[PARTS][TILES][4];
    for (int p = 0; p < PARTS; p++)
      for (int t = 0; t < TILES; t++)
        for (int i = 0; i < 4; i++) acc[p][t][i] = 0.0f;
    uint byte = in_row * 64 + 16 * c;
    bool holds = WHOLE || (inside && byte < ROW);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint4 columns[TILES];
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        uint column = 8 * t + r, m = column / PER_STEP;
        bool mine = holds && m < M && 16 * c / SEGMENT == column % PER_STEP;
        X from = x + size_t(m) * K + (byte + 4 * j) * 8 / BITS;
        if (BITS == 4) {
          uint4 pairs = Where::load16(from, mine);
          columns[t] = four_words(low_halves(pairs.x, pairs.z), high_halves(pairs.x, pairs.z), low_halves(pairs.y, pairs.w),
                                  high_halves(pairs.y, pairs.w));
        } else {
          uint2 pairs = Where::load8(from, mine);
          uint even = low_halves(pairs.x, pairs.y), odd = high_halves(pairs.x, pairs.y);
          columns[t] = four_words(even, even, odd, odd);
        }
      }
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        uint4 low = chunk.words[u][p][0], high = chunk.words[u][p][1];
        uint4 top = OffsetPairs<T, BITS>::of(j == 0 ? low.x : j == 1 ? low.y : j == 2 ? low.z : low.w);
        uint4 bottom = OffsetPairs<T, BITS>::of(j == 0 ? high.x : j == 1 ? high.y : j == 2 ? high.z : high.w);
#pragma unroll
        for (int t = 0; t < TILES; t++) {
          mma_16x8x16<T>(acc[p][t], four_words(top.x, bottom.x, top.y, bottom.y), two_words(columns[t].x, columns[t].y), lane);
          mma_16x8x16<T>(acc[p][t], four_words(top.z, bottom.z, top.w, bottom.w), two_words(columns[t].z, columns[t].w), lane);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (uint i = 0; i < 2; i++) {
        uint column = 8 * t + 2 * c + i, m = column / PER_STEP, segment = in_row * PER_STEP + column % PER_STEP;
        float sum = m < M && (WHOLE || (inside && segment < SEGMENTS)) ? sums[m * SEGMENTS + segment] : 0.0f;
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
#pragma unroll
          for (uint h = 0; h < 2; h++) {
            uint scales = chunk.scales[u][p][h], biases = chunk.biases[u][p][h];
            float scale = i == 0 ? float_low<T>(scales) : float_high<T>(scales);
            float bias = i == 0 ? float_low<T>(biases) : float_high<T>(biases);
            float dot = acc[p][t][2 * h + i] - OffsetPairs<T, BITS>::OFFSET * sum;
            total[p][t][2 * h + i] += weigh * (scale * dot + bias * sum);
          }
        }
      }
    }
  }

  static METAL_FUNC float at(threadgroup const float* memory, uint part, uint row, uint m) {
    float sum = 0.0f;
    for (int s = 0; s < SIMDS; s++) sum += memory[SUMS + ((s * PARTS + part) * 16 + row) * M + m];
    return sum;
  }
};

//@provides larger
// Of two numbers known when the text is compiled: threadgroup memory that several stages share.
constexpr int larger(int a, int b) { return a > b ? a : b; }

//@provides few_rows_tile
// PARTS tiles of 16 columns of y, from column `first` on, of `stride` values a row. All threads of SIMDS simdgroups call; `memory` is
// free again behind the next barrier.
template <class FewRows, int M, int N, int PARTS, int SIMDS, class S, class T>
METAL_FUNC void few_rows_tile(const device uint* w, const device S* scales, const device S* biases, typename FewRows::X x, uint first,
                              device T* y, threadgroup float* memory, uint thread_, uint lane, uint simdgroup) {
  WeightRows<S> parts[PARTS];
  for (int p = 0; p < PARTS; p++) parts[p].w = w, parts[p].scales = scales, parts[p].biases = biases, parts[p].first = first + 16 * p;
  FewRows::run(parts, x, 0, nullptr, nullptr, memory, lane, simdgroup);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_; i < 16 * PARTS * M; i += 32 * SIMDS) {
    uint row = i % (16 * PARTS), m = i / (16 * PARTS);
    if (first + row < uint(N)) y[size_t(m) * N + first + row] = static_cast<T>(FewRows::at(memory, row / 16, row % 16, m));
  }
}

//@provides gate_up_tile
// hidden[n] = silu(gate . x) (up . x) for one assignment and a tile's columns, from parts[0].first on: gate's and up's rows of its
// expert are read together, each once. `factor` is one.
template <class FewRows, int N, class S, class T>
METAL_FUNC void gate_up_tile(thread const WeightRows<S>* parts, const device T* x, threadgroup const int* expert,
                             threadgroup const float* factor, device T* hidden, threadgroup float* memory, uint thread_, uint lane,
                             uint simdgroup) {
  FewRows::run(parts, x, 0, expert, factor, memory, lane, simdgroup);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint column = parts[0].first + thread_;
  if (thread_ < FewRows::COLUMNS && column < uint(N)) {
    hidden[column] = static_cast<T>(swiglu(FewRows::at(memory, 0, thread_, 0), FewRows::at(memory, 1, thread_, 0)));
  }
}

//@provides prefetch_rows
// Send for the 16 rows of a tile and their scales (see `prefetch`), by three threads.
template <int BITS, int GROUP, int K, int N, class S>
METAL_FUNC void prefetch_rows(thread const WeightRows<S>& tile, size_t matrix, uint thread_) {
  if (tile.first >= uint(N) || thread_ % 32 != 0 || thread_ >= 96) return;
  uint rows = min(16u, uint(N) - tile.first);
  size_t row = matrix * N + tile.first;
  if (thread_ == 0) prefetch(tile.w + row * (uint(K) * BITS / 32), rows * (uint(K) * BITS / 8));
  if (thread_ == 32) prefetch(tile.scales + row * (K / GROUP), rows * (K / GROUP) * uint(sizeof(S)));
  if (thread_ == 64) prefetch(tile.biases + row * (K / GROUP), rows * (K / GROUP) * uint(sizeof(S)));
}
