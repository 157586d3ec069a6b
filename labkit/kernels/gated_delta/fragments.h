// Fragments of NVIDIA's tensor cores (sm_80 and later). A simdgroup multiplies A [16 x 16] by B [16 x 8] into C [16 x 8]; lane l holds
//   C: rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next      c[0], c[1] and c[2], c[3]
//   A: the same rows for k 0..7 (x, y) and for k 8..15 (z, w), two bf16 a word
//   B: column l / 4, k 2 (l % 4) and the next (b0), and those + 8 (b1)
// So C, rounded, is an A operand, and C of X is a B operand of X transposed. On CUDA these are single instructions; elsewhere the
// same by shuffles, which is how the simulator checks the kernels that use them. (There a copy lands at once: a forgotten
// `wait_for_copies` shows on the GPU alone.)

//@provides four
METAL_FUNC uint4 four(uint x, uint y, uint z, uint w) {
  uint4 r;
  r.x = x;
  r.y = y;
  r.z = z;
  r.w = w;
  return r;
}

//@provides pack_bf16 low_bf16 high_bf16
#ifdef LABKIT_CUDA
METAL_FUNC uint pack_bf16(float low, float high) {
  uint packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
#else
METAL_FUNC uint pack_bf16(float low, float high) {
  return uint(as_type<ushort>(static_cast<bfloat>(low))) | (uint(as_type<ushort>(static_cast<bfloat>(high))) << 16);
}
#endif
METAL_FUNC float low_bf16(uint packed) { return as_type<float>(packed << 16); }
METAL_FUNC float high_bf16(uint packed) { return as_type<float>(packed & 0xffff0000u); }

//@provides as_rows
// Two neighbouring C tiles, rounded, as an A operand.
METAL_FUNC uint4 as_rows(const thread float* one, const thread float* two) {
  return four(pack_bf16(one[0], one[1]), pack_bf16(one[2], one[3]), pack_bf16(two[0], two[1]), pack_bf16(two[2], two[3]));
}

//@provides rest_as_rows
// What that rounding left over, as a second A operand.
METAL_FUNC uint4 rest_as_rows(const thread float* one, const thread float* two, uint4 rounded) {
  return four(
      pack_bf16(one[0] - low_bf16(rounded.x), one[1] - high_bf16(rounded.x)),
      pack_bf16(one[2] - low_bf16(rounded.y), one[3] - high_bf16(rounded.y)),
      pack_bf16(two[0] - low_bf16(rounded.z), two[1] - high_bf16(rounded.z)),
      pack_bf16(two[2] - low_bf16(rounded.w), two[3] - high_bf16(rounded.w)));
}

//@provides as_columns
// Two neighbouring C tiles of X, rounded, as B operands of X transposed: (b0, b1) of rows 0..7 and of rows 8..15.
METAL_FUNC uint4 as_columns(const thread float* one, const thread float* two) {
  return four(pack_bf16(one[0], one[1]), pack_bf16(two[0], two[1]), pack_bf16(one[2], one[3]), pack_bf16(two[2], two[3]));
}

//@provides rest_as_columns
METAL_FUNC uint4 rest_as_columns(const thread float* one, const thread float* two, uint4 rounded) {
  return four(
      pack_bf16(one[0] - low_bf16(rounded.x), one[1] - high_bf16(rounded.x)),
      pack_bf16(two[0] - low_bf16(rounded.y), two[1] - high_bf16(rounded.y)),
      pack_bf16(one[2] - low_bf16(rounded.z), one[3] - high_bf16(rounded.z)),
      pack_bf16(two[2] - low_bf16(rounded.w), two[3] - high_bf16(rounded.w)));
}

//@provides mma_bf16
#ifdef LABKIT_CUDA
METAL_FUNC void mma_bf16(thread float* c, uint4 a, uint b0, uint b1, uint) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
#else
inline void mma_bf16(thread float* c, uint4 a, uint b0, uint b1, uint lane) {
  for (uint q = 0; q < 4; q++) {
    uint4 rows = simd_shuffle(a, lane / 4 * 4 + q);
    for (uint e = 0; e < 2; e++) {
      uint from = (lane % 4 * 2 + e) * 4 + q;
      uint2 column;
      column.x = simd_shuffle(b0, from);
      column.y = simd_shuffle(b1, from);
      c[e] += low_bf16(rows.x) * low_bf16(column.x) + high_bf16(rows.x) * high_bf16(column.x) +
              low_bf16(rows.z) * low_bf16(column.y) + high_bf16(rows.z) * high_bf16(column.y);
      c[2 + e] += low_bf16(rows.y) * low_bf16(column.x) + high_bf16(rows.y) * high_bf16(column.x) +
                  low_bf16(rows.w) * low_bf16(column.y) + high_bf16(rows.w) * high_bf16(column.y);
    }
  }
}
#endif

//@provides mma_pair
// Two neighbouring C tiles at once.
METAL_FUNC void mma_pair(thread float* one, thread float* two, uint4 rows, uint4 columns, uint lane) {
  mma_bf16(one, rows, columns.x, columns.y, lane);
  mma_bf16(two, rows, columns.z, columns.w, lane);
}

//@provides load_matrices load_matrices_transposed
// Four 8 x 8 matrices of bf16 from threadgroup memory: lane l says where row l % 8 of matrix l / 8 begins.
#ifdef LABKIT_CUDA
METAL_FUNC uint4 load_matrices(const threadgroup char* tile, uint at, uint) {
  uint4 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(uint(__cvta_generic_to_shared(tile)) + at) : "memory");
  return r;
}
METAL_FUNC uint4 load_matrices_transposed(const threadgroup char* tile, uint at, uint) {
  uint4 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "r"(uint(__cvta_generic_to_shared(tile)) + at) : "memory");
  return r;
}
#else
inline uint4 load_matrices(const threadgroup char* tile, uint at, uint lane) {
  uint4 r;
  for (uint m = 0; m < 4; m++) {
    uint row = simd_shuffle(at, m * 8 + lane / 4);
    r[m] = *(const threadgroup uint*)(tile + row + lane % 4 * 4);
  }
  return r;
}
inline uint4 load_matrices_transposed(const threadgroup char* tile, uint at, uint lane) {
  uint4 r;
  for (uint m = 0; m < 4; m++) {
    uint one = simd_shuffle(at, m * 8 + lane % 4 * 2), two = simd_shuffle(at, m * 8 + lane % 4 * 2 + 1);
    r[m] = uint(*(const threadgroup ushort*)(tile + one + lane / 4 * 2)) |
           (uint(*(const threadgroup ushort*)(tile + two + lane / 4 * 2)) << 16);
  }
  return r;
}
#endif

//@provides transpose_matrix
#ifdef LABKIT_CUDA
METAL_FUNC uint transpose_matrix(uint a, uint) {
  uint r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
  return r;
}
#else
inline uint transpose_matrix(uint a, uint lane) {
  uint one = simd_shuffle(a, lane % 4 * 8 + lane / 8), two = simd_shuffle(a, lane % 4 * 8 + 4 + lane / 8);
  uint shift = lane / 4 % 2 * 16;
  return ((one >> shift) & 0xffffu) | (((two >> shift) & 0xffffu) << 16);
}
#endif

//@provides copy16 copies_issued wait_for_copies
// 16 bytes from device to threadgroup memory, in flight until waited for; zeros where `counts` is false.
#ifdef LABKIT_CUDA
METAL_FUNC void copy16(threadgroup char* tile, uint at, const device char* from, bool counts) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(uint(__cvta_generic_to_shared(tile)) + at), "l"(from),
               "r"(counts ? 16 : 0) : "memory");
}
METAL_FUNC void copies_issued() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the latest LATER groups have landed.
template <int LATER> METAL_FUNC void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory"); }
#else
METAL_FUNC void copy16(threadgroup char* tile, uint at, const device char* from, bool counts) {
  *(threadgroup uint4*)(tile + at) = counts ? *(const device uint4*)from : uint4(0);
}
METAL_FUNC void copies_issued() {}
template <int LATER> METAL_FUNC void wait_for_copies() {}
#endif

//@provides tile_at
// Where a 16-byte piece of a token's 256 bytes lies in a tile: shuffled within the row, so that eight rows never share a bank.
METAL_FUNC uint tile_at(uint token, uint piece) { return token * 256 + ((piece ^ (token & 7)) << 4); }

//@provides copy_tile
// TOKENS rows of 128 bf16 into a tile; rows from `valid` on become zero.
template <int TOKENS, int THREADS>
METAL_FUNC void copy_tile(threadgroup char* tile, const device bfloat* rows, uint stride, int valid, uint thread_id) {
#pragma unroll
  for (uint i = 0; i < TOKENS * 16 / THREADS; i++) {
    uint at = thread_id + i * THREADS, token = at / 16, piece = at % 16;
    bool counts = int(token) < valid;
    const device bfloat* from = rows + (counts ? size_t(token) * stride + piece * 8 : 0);
    copy16(tile, tile_at(token, piece), (const device char*)from, counts);
  }
}

//@provides tokens_as_columns
// B operands of two neighbouring tiles of columns: tokens are columns, dimensions are k.
METAL_FUNC uint4 tokens_as_columns(const threadgroup char* tile, uint token, uint dim, uint lane) {
  return load_matrices(tile, tile_at(token + lane / 16 * 8 + lane % 8, dim / 8 + lane / 8 % 2), lane);
}

//@provides tokens_as_k
// The same with tokens as k and dimensions as columns.
METAL_FUNC uint4 tokens_as_k(const threadgroup char* tile, uint token, uint dim, uint lane) {
  return load_matrices_transposed(tile, tile_at(token + lane / 8 % 2 * 8 + lane % 8, dim / 8 + lane / 16), lane);
}

//@provides tokens_as_rows
// A operand: tokens are rows, dimensions are k.
METAL_FUNC uint4 tokens_as_rows(const threadgroup char* tile, uint token, uint dim, uint lane) {
  return load_matrices(tile, tile_at(token + lane % 16, dim / 8 + lane / 16), lane);
}

//@provides dims_as_rows
// A operand: dimensions are rows, tokens are k.
METAL_FUNC uint4 dims_as_rows(const threadgroup char* tile, uint token, uint dim, uint lane) {
  return load_matrices_transposed(tile, tile_at(token + lane / 16 * 8 + lane % 8, dim / 8 + lane / 8 % 2), lane);
}

//@provides zero_tiles
template <int N> METAL_FUNC void zero_tiles(thread float* c) {
#pragma unroll
  for (int i = 0; i < 4 * N; i++) c[i] = 0.0f;
}

//@provides copy_piece
template <int BYTES, int THREADS> METAL_FUNC void copy_piece(threadgroup char* tile, const device char* from, uint thread_id) {
#pragma unroll
  for (uint i = 0; i < BYTES / 16 / THREADS; i++) {
    uint at = (thread_id + i * THREADS) * 16;
    copy16(tile, at, from + at, true);
  }
}

//@provides scale_columns
// C tiles times a factor a column.
template <int N> METAL_FUNC void scale_columns(thread float* c, const device float* factors, uint two) {
#pragma unroll
  for (int t = 0; t < N; t++) {
    float2 pair = *(const device float2*)(factors + t * 8 + two);
    c[4 * t] *= pair.x;
    c[4 * t + 1] *= pair.y;
    c[4 * t + 2] *= pair.x;
    c[4 * t + 3] *= pair.y;
  }
}
