// Many rows of activations times rows of packed weights, which are dequantised inside the tile. Two forms of one contract: by
// simdgroup matrices (Metal's own, any float type) and by CUDA's tensor core (16-bit floats).
//
// 128 threads compute BM rows by COLUMNS columns. PAIRED tiles hold half as many columns of each of two matrices, gate and up,
// such that a thread has both values of a place. A kernel's body:
//   Tile tile;
//   for (i < Tile::COPIES) sources[i] = where row Tile::copied_row(thread, i) of x begins; clamp rows beyond the last
//   tile.run(memory, sources, weights, rows, lane, simdgroup);
//   for (i < Tile::ROWS, j < Tile::RUNS) tile.row(i), tile.column(j): where the thread holds a run of Tile::RUN adjacent
//   results; tile.take(i, j, part, values): them

//@provides TileWeights
// One matrix, or a pair, of N rows of K packed weights, and the first output column of the tile. Columns beyond N repeat the last.
template <class S> struct TileWeights {
  const device uint* w[2];
  const device S* scales[2];
  const device S* biases[2];
  uint first;
};

//@provides TileByTensor
template <class T, class S, int BITS, int GROUP, int K, int N, int BM, int STAGES, bool PAIRED> struct TileByTensor {
  static constexpr constant int COLUMNS = 128;
  static constexpr constant int OUTPUTS = PAIRED ? COLUMNS / 2 : COLUMNS;  // columns of the result
  static constexpr constant int COPIES = (BM + 31) / 32;                   // of 16 bytes of x a thread makes for 32 values of k
  static constexpr constant int WORDS = BITS;                              // packed in 32 weights
  static constexpr constant int STAGE = BM * 4 + COLUMNS * WORDS / 4;      // 16-byte units
  static constexpr constant int MEMORY = STAGES * STAGE;
  static constexpr constant int BLOCKS = K / 32;
  static constexpr constant int FRAGMENTS = PAIRED ? 2 : 4;                // of 8 columns, in each matrix
  static constexpr constant int ROWS = BM / 8, RUNS = 1, RUN = 2 * FRAGMENTS;

  float acc[BM / 16][4][4];
  uint lane, simdgroup, first;

  static METAL_FUNC uint copied_row(uint thread_, int i) { return thread_ / 4 + 32 * i; }

  // Slot `local` of the staged weights, column n of fragment j of a simdgroup: its matrix, and its row there. Of the
  // simdgroup's columns these are not the next eight: so chosen, a lane's results of all fragments are one run.
  static METAL_FUNC uint part_of(uint local) { return PAIRED && local % 32 >= 16 ? 1 : 0; }
  METAL_FUNC uint index_of(uint local) const {
    uint n = local % 8, j = local % 32 / 8 % FRAGMENTS;
    return min(first + local / 32 * (8 * FRAGMENTS) + n / 2 * RUN + 2 * j + n % 2, uint(N - 1));
  }

  METAL_FUNC void run(threadgroup uint4* memory, const device T* const thread* sources, thread const TileWeights<S>& weights, uint rows,
                      uint lane_, uint simdgroup_) {
    lane = lane_, simdgroup = simdgroup_, first = weights.first;
    uint thread_ = simdgroup * 32 + lane, r = lane / 4, c = lane % 4;
#pragma unroll
    for (int i = 0; i < BM / 16; i++)
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int k = 0; k < 4; k++) acc[i][j][k] = 0.0f;
    AsyncCopies<COPIES + WORDS / 4, STAGES> copies;
    const device uint* matrix = part_of(thread_) == 0 ? weights.w[0] : weights.w[1];
    const device uint4* packed = (const device uint4*)(matrix + size_t(index_of(thread_)) * (K * BITS / 32));
    size_t group_row[4];
#pragma unroll
    for (int j = 0; j < 4; j++) group_row[j] = size_t(index_of(32 * simdgroup + 8 * j + r)) * (K / GROUP);

#pragma unroll
    for (int block = 0; block < STAGES - 1; block++) issue(copies, memory, sources, packed, block, thread_);
    S scale[4], bias[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint part = PAIRED ? j / 2 : 0;
      scale[j] = weights.scales[part][group_row[j]];
      bias[j] = weights.biases[part][group_row[j]];
    }
#pragma unroll 1
    for (int block = 0; block < BLOCKS; block++) {
      copies.template wait<STAGES - 2>();
      threadgroup_barrier(mem_flags::mem_threadgroup);
      issue(copies, memory, sources, packed, block + STAGES - 1, thread_);
      // The next block's scales are on their way while this one is multiplied.
      S next_scale[4], next_bias[4];
      bool fresh = (block + 1) * 32 % GROUP == 0 && block + 1 < BLOCKS;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        uint part = PAIRED ? j / 2 : 0;
        next_scale[j] = scale[j], next_bias[j] = bias[j];
        if (fresh) {
          next_scale[j] = weights.scales[part][group_row[j] + (block + 1) * 32 / GROUP];
          next_bias[j] = weights.biases[part][group_row[j] + (block + 1) * 32 / GROUP];
        }
      }
      threadgroup const uint4* stage = memory + block % STAGES * STAGE;
      threadgroup const uint* words = (threadgroup const uint*)(stage + BM * 4);
      uint4 right[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        threadgroup const uint* mine = words + (32 * simdgroup + 8 * j + r) * WORDS + c * (WORDS / 4);
        right[j] = dequantize8<T, BITS>(mine[0], mine[WORDS / 4 - 1], static_cast<T>(scale[j]), static_cast<T>(bias[j]));
      }
#pragma unroll
      for (int i = 0; i < BM / 16; i++) {
        if (16 * uint(i) < rows) {
          // Lane (r, c) has k = 8c .. 8c + 7 of both operands; which of the tensor core's k these are does not matter.
          uint4 top = stage[(16 * i + r) * 4 + c], bottom = stage[(16 * i + r + 8) * 4 + c];
#pragma unroll
          for (int j = 0; j < 4; j++) {
            mma_16x8x16<T>(acc[i][j], four_words(top.x, bottom.x, top.y, bottom.y), two_words(right[j].x, right[j].y), lane);
            mma_16x8x16<T>(acc[i][j], four_words(top.z, bottom.z, top.w, bottom.w), two_words(right[j].z, right[j].w), lane);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 4; j++) scale[j] = next_scale[j], bias[j] = next_bias[j];
    }
  }

  template <class Copies>
  static METAL_FUNC void issue(thread Copies& copies, threadgroup uint4* memory, const device T* const thread* sources,
                               const device uint4* packed, int block, uint thread_) {
    if (block < BLOCKS) {
      threadgroup uint4* stage = memory + block % STAGES * STAGE;
#pragma unroll
      for (int i = 0; i < COPIES; i++) {
        uint row = copied_row(thread_, i);
        if (BM >= 32 || row < BM) {
          copies.copy(stage + row * 4 + thread_ % 4, (const device uint4*)sources[i] + block * 4 + thread_ % 4, true);
        }
      }
#pragma unroll
      for (int i = 0; i < WORDS / 4; i++) {
        copies.copy(stage + BM * 4 + thread_ * (WORDS / 4) + i, packed + block * (WORDS / 4) + i, true);
      }
    }
    copies.commit();
  }

  METAL_FUNC uint row(int i) const { return i / 2 * 16 + i % 2 * 8 + lane / 4; }
  METAL_FUNC uint column(int) const { return first + simdgroup * (8 * FRAGMENTS) + lane % 4 * RUN; }
  METAL_FUNC void take(int i, int, int part, thread float* values) const {
#pragma unroll
    for (int j = 0; j < FRAGMENTS; j++) {
      values[2 * j] = acc[i / 2][j + 2 * part][i % 2 * 2];
      values[2 * j + 1] = acc[i / 2][j + 2 * part][i % 2 * 2 + 1];
    }
  }
};

//@provides TileBySimdgroup
template <class T, class S, int BITS, int GROUP, int K, int N, int BM, int STAGES, bool PAIRED> struct TileBySimdgroup {
  static constexpr constant int COLUMNS = 64;
  static constexpr constant int OUTPUTS = PAIRED ? COLUMNS / 2 : COLUMNS;
  static constexpr constant int COPIES = (BM + 31) / 32;                 // rows of x of which a thread loads 8 values of each 32
  static constexpr constant int PITCH = 32 + 16 / sizeof(T);             // elements of a staged row: 16 bytes more, against bank conflicts
  static constexpr constant int MEMORY = (BM + COLUMNS) * PITCH * sizeof(T) / 16;
  static constexpr constant int BLOCKS = K / 32;
  static constexpr constant int DOWN = BM >= 32 ? 2 : 1, ACROSS = 4 / DOWN;  // how the simdgroups share the tile
  static constexpr constant int HIGH = BM / DOWN / 8, WIDE = COLUMNS / ACROSS / 8;
  static constexpr constant int FRAGMENTS = PAIRED ? WIDE / 2 : WIDE;
  static constexpr constant int ROWS = HIGH, RUNS = FRAGMENTS, RUN = 2;

  simdgroup_matrix<float, 8, 8> acc[HIGH][WIDE];
  uint lane, simdgroup, first;

  static METAL_FUNC uint copied_row(uint thread_, int i) { return thread_ / 4 + 32 * i; }

  static METAL_FUNC uint part_of(uint local) { return PAIRED && local % (8 * WIDE) >= 4 * WIDE ? 1 : 0; }
  METAL_FUNC uint index_of(uint local) const {
    uint output = PAIRED ? local / (8 * WIDE) * (4 * WIDE) + local % (4 * WIDE) : local;
    return min(first + output, uint(N - 1));
  }

  METAL_FUNC void run(threadgroup uint4* memory, const device T* const thread* sources, thread const TileWeights<S>& weights, uint rows,
                      uint lane_, uint simdgroup_) {
    lane = lane_, simdgroup = simdgroup_, first = weights.first;
    uint thread_ = simdgroup * 32 + lane;
    threadgroup T* left = (threadgroup T*)memory;
    threadgroup T* right = left + BM * PITCH;
    for (int i = 0; i < HIGH; i++)
      for (int j = 0; j < WIDE; j++) acc[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    // Half a row of 32 weights a thread.
    uint local = thread_ / 2, half_ = thread_ % 2, part = part_of(local);
    size_t index = index_of(local);
    const device uint* packed = (part == 0 ? weights.w[0] : weights.w[1]) + index * (K * BITS / 32) + half_ * (BITS / 2);
    const device S* scales = (part == 0 ? weights.scales[0] : weights.scales[1]) + index * (K / GROUP);
    const device S* biases = (part == 0 ? weights.biases[0] : weights.biases[1]) + index * (K / GROUP);

    vec<T, 4> values[COPIES][2];
    uint words[BITS / 2];
    load(values, words, sources, packed, 0, thread_);
    float scale = static_cast<float>(scales[0]), bias = static_cast<float>(biases[0]);
    uint first_row = simdgroup / ACROSS * (8 * HIGH);
    for (int block = 0; block < BLOCKS; block++) {
      for (int i = 0; i < COPIES; i++) {
        uint row = copied_row(thread_, i);
        if (BM >= 32 || row < BM) {
          threadgroup vec<T, 4>* to = (threadgroup vec<T, 4>*)(left + row * PITCH + thread_ % 4 * 8);
          to[0] = values[i][0], to[1] = values[i][1];
        }
      }
      for (int i = 0; i < BITS / 2; i++) {
        constexpr int PER_WORD = 32 / BITS;
        float q[PER_WORD];
        unpack_word<BITS>(words[i], q);
        for (int k = 0; k < PER_WORD; k += 4) {
          vec<T, 4> four;
          four.x = static_cast<T>(scale * q[k] + bias), four.y = static_cast<T>(scale * q[k + 1] + bias);
          four.z = static_cast<T>(scale * q[k + 2] + bias), four.w = static_cast<T>(scale * q[k + 3] + bias);
          *(threadgroup vec<T, 4>*)(right + local * PITCH + half_ * 16 + i * PER_WORD + k) = four;
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      // The next block's loads are in flight while this one is multiplied.
      if (block + 1 < BLOCKS) {
        load(values, words, sources, packed, block + 1, thread_);
        scale = static_cast<float>(scales[(block + 1) * 32 / GROUP]);
        bias = static_cast<float>(biases[(block + 1) * 32 / GROUP]);
      }
      if (first_row < rows) {
        for (int k = 0; k < 32; k += 8) {
          simdgroup_matrix<T, 8, 8> b[WIDE];
          for (int j = 0; j < WIDE; j++)
            simdgroup_load(b[j], right + (simdgroup % ACROSS * (8 * WIDE) + 8 * j) * PITCH + k, PITCH, ulong2(0), true);
          for (int i = 0; i < HIGH; i++) {
            simdgroup_matrix<T, 8, 8> a;
            simdgroup_load(a, left + (first_row + 8 * i) * PITCH + k, PITCH);
            for (int j = 0; j < WIDE; j++) simdgroup_multiply_accumulate(acc[i][j], a, b[j], acc[i][j]);
          }
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }

  static METAL_FUNC void load(thread vec<T, 4> (*values)[2], thread uint* words, const device T* const thread* sources,
                              const device uint* packed, int block, uint thread_) {
    for (int i = 0; i < COPIES; i++) {
      const device vec<T, 4>* from = (const device vec<T, 4>*)(sources[i] + block * 32 + thread_ % 4 * 8);
      values[i][0] = from[0], values[i][1] = from[1];
    }
    for (int i = 0; i < BITS / 2; i++) words[i] = packed[block * BITS + i];
  }

  METAL_FUNC uint row(int i) const { return simdgroup / ACROSS * (8 * HIGH) + 8 * i + (lane / 4 & 4) + lane / 2 % 4; }
  METAL_FUNC uint column(int j) const {
    return first + simdgroup % ACROSS * (8 * FRAGMENTS) + 8 * j + (lane / 4 & 2) * 2 + lane % 2 * 2;
  }
  METAL_FUNC void take(int i, int j, int part, thread float* values) {
    values[0] = acc[i][j + FRAGMENTS * part].thread_elements()[0];
    values[1] = acc[i][j + FRAGMENTS * part].thread_elements()[1];
  }
};

//@provides store_run
// RUN adjacent columns of a row of N, from a multiple of RUN on; in one store where rows begin at such places too.
template <int N, int RUN> METAL_FUNC void store_run(device float* row, uint column, thread const float* values) {
#pragma unroll
  for (int i = 0; i < RUN; i++) {
    if (column + i < uint(N)) row[column + i] = values[i];
  }
}
template <int N, int RUN, class T> METAL_FUNC void store_run(device T* row, uint column, thread const float* values) {
  if (N % RUN == 0) {
    if (column < uint(N)) {
      uint pairs[RUN / 2];
#pragma unroll
      for (int i = 0; i < RUN / 2; i++) pairs[i] = pack_pair<T>(static_cast<T>(values[2 * i]), static_cast<T>(values[2 * i + 1]));
      device T* to = row + column;
      if (RUN == 8) *(device uint4*)to = four_words(pairs[0], pairs[1], pairs[RUN / 2 - 2], pairs[RUN / 2 - 1]);
      if (RUN == 4) *(device uint2*)to = two_words(pairs[0], pairs[RUN / 2 - 1]);
      if (RUN == 2) *(device uint*)to = pairs[0];
    }
  } else {
#pragma unroll
    for (int i = 0; i < RUN; i++) {
      if (column + i < uint(N)) row[column + i] = static_cast<T>(values[i]);
    }
  }
}
