// A chunk of new tokens against all columns before them, over tensor tiles for 16-bit floats. Scores live in registers alone.
//
// A simdgroup owns 16 queries of one head; a threadgroup's simdgroups share tiles of KEYS columns, keys and values in turn:
// values arrive while scores are computed, the next keys while values are summed. Lane l: r = l / 4, c = l % 4. As in
// decode_tensor.metal the order of a head's elements inside a product is chosen so that 16-byte reads are operands as they
// lie: of keys row r, 8 elements from 8c in blocks of 32; of values rows 2c, 2c + 1, 2c + 8, 2c + 9, 8 elements from 8r in
// blocks of 64, whose pairs along the columns are 8 operands; results come out as 8 adjacent elements.
constexpr uint KEYS = 32, CHUNKS = D / 8;  // columns of a tile; 16-byte chunks of a head
constexpr uint KEY_BLOCKS = D / 32, VALUE_BLOCKS = D / 64;
constexpr int COPIES = KEYS * CHUNKS / (SIMDS * 32);
threadgroup uint4 key_tile[KEYS * D / 8];
threadgroup uint4 value_tile[KEYS * D / 8];

uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup, t = thread_index_in_threadgroup;
uint r = lane / 4, c = lane % 4;
uint head = threadgroup_position_in_grid.y, row = threadgroup_position_in_grid.z;
// The last queries see most columns: they start first.
uint tile = threadgroups_per_grid.x - 1 - threadgroup_position_in_grid.x;
int first_query = int(tile * 16 * SIMDS);
int origin = start[row], lowest = first[row];
int end = min(origin + min(first_query + int(16 * SIMDS), int(L)), int(S));
int begin = max(lowest, 0);  // tiles begin with the row's first column, so that padding does not move their borders

int query[2];
uint4 q[KEY_BLOCKS][2];
for (uint h = 0; h < 2; h++) {
  query[h] = first_query + int(16 * simd + r + 8 * h);
  size_t place = ((size_t(row) * HQ + head) * L + min(query[h], int(L) - 1)) * D;
  for (uint b = 0; b < KEY_BLOCKS; b++) q[b][h] = *(const device uint4*)(queries + place + 32 * b + 8 * c);
}
float sums[VALUE_BLOCKS][8][4];
for (uint b = 0; b < VALUE_BLOCKS; b++)
  for (uint j = 0; j < 8; j++)
    for (uint i = 0; i < 4; i++) sums[b][j][i] = 0.0f;
float top[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
float factor = scale * M_LOG2E_F;
size_t head_start = (size_t(row) * HKV + head / (HQ / HKV)) * size_t(S) * CHUNKS;
auto key_chunks = (const device uint4*)keys + head_start;
auto value_chunks = (const device uint4*)values + head_start;
AsyncCopies<COPIES, 2> copies;

// Chunks are swizzled so that the eight lanes which read together meet all banks.
for (int i = 0; i < COPIES; i++) {
  uint item = t + i * SIMDS * 32, column = item / CHUNKS, chunk = item % CHUNKS;
  size_t from = size_t(min(begin + int(column), int(S) - 1)) * CHUNKS + chunk;
  copies.copy(key_tile + column * CHUNKS + (chunk ^ ((column & 1) * 4)), key_chunks + from, true);
}
copies.commit();
#pragma unroll 1
for (int block = begin; block < end; block += int(KEYS)) {
  for (int i = 0; i < COPIES; i++) {
    uint item = t + i * SIMDS * 32, column = item / CHUNKS, chunk = item % CHUNKS;
    size_t from = size_t(min(block + int(column), int(S) - 1)) * CHUNKS + chunk;
    copies.copy(value_tile + column * CHUNKS + (chunk ^ ((column / 2 & 3) * 2)), value_chunks + from, true);
  }
  copies.commit();
  copies.template wait<1>();
  threadgroup_barrier(mem_flags::mem_threadgroup);

  float score[KEYS / 8][4];
#pragma unroll
  for (uint n = 0; n < KEYS / 8; n++) {
    for (uint i = 0; i < 4; i++) score[n][i] = 0.0f;
#pragma unroll
    for (uint b = 0; b < KEY_BLOCKS; b++) {
      uint4 k = key_tile[(8 * n + r) * CHUNKS + ((4 * b + c) ^ ((r & 1) * 4))];
      mma_16x8x16<T>(score[n], four_words(q[b][0].x, q[b][1].x, q[b][0].y, q[b][1].y), two_words(k.x, k.y), lane);
      mma_16x8x16<T>(score[n], four_words(q[b][0].z, q[b][1].z, q[b][0].w, q[b][1].w), two_words(k.z, k.w), lane);
    }
  }
  // Only tiles on the border hold columns that a query does not see.
  bool whole = block >= lowest && block + int(KEYS) <= origin + first_query + 1 && block + int(KEYS) <= int(S);
  float highest[2] = {top[0], top[1]};
#pragma unroll
  for (uint n = 0; n < KEYS / 8; n++) {
#pragma unroll
    for (uint i = 0; i < 4; i++) {
      int column = block + int(8 * n + 2 * c + i % 2);
      bool sees = whole || (column >= lowest && column <= origin + query[i / 2] && column < int(S));
      score[n][i] = sees ? score[n][i] * factor : -INFINITY;
      highest[i / 2] = max(highest[i / 2], score[n][i]);
    }
  }
  float keep[2];
  for (uint h = 0; h < 2; h++) {
    highest[h] = max(highest[h], simd_shuffle_xor(highest[h], static_cast<ushort>(1)));
    highest[h] = max(highest[h], simd_shuffle_xor(highest[h], static_cast<ushort>(2)));
    // A query that has seen nothing yet keeps its zeros.
    float base = highest[h] == -INFINITY ? 0.0f : highest[h];
    keep[h] = exp2(top[h] - base);
    top[h] = highest[h];
    total[h] *= keep[h];
    highest[h] = base;
  }
#pragma unroll
  for (uint n = 0; n < KEYS / 8; n++) {
#pragma unroll
    for (uint i = 0; i < 4; i++) {
      score[n][i] = exp2(score[n][i] - highest[i / 2]);
      total[i / 2] += score[n][i];
    }
  }
#pragma unroll
  for (uint b = 0; b < VALUE_BLOCKS; b++)
#pragma unroll
    for (uint j = 0; j < 8; j++)
#pragma unroll
      for (uint i = 0; i < 4; i++) sums[b][j][i] *= keep[i / 2];
  threadgroup_barrier(mem_flags::mem_threadgroup);

  if (block + int(KEYS) < end) {
    for (int i = 0; i < COPIES; i++) {
      uint item = t + i * SIMDS * 32, column = item / CHUNKS, chunk = item % CHUNKS;
      size_t from = size_t(min(block + int(KEYS + column), int(S) - 1)) * CHUNKS + chunk;
      copies.copy(key_tile + column * CHUNKS + (chunk ^ ((column & 1) * 4)), key_chunks + from, true);
    }
  }
  copies.commit();
  copies.template wait<1>();
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (uint s = 0; s < KEYS / 16; s++) {
    uint4 p = four_words(
        pack_pair<T>(static_cast<T>(score[2 * s][0]), static_cast<T>(score[2 * s][1])),
        pack_pair<T>(static_cast<T>(score[2 * s][2]), static_cast<T>(score[2 * s][3])),
        pack_pair<T>(static_cast<T>(score[2 * s + 1][0]), static_cast<T>(score[2 * s + 1][1])),
        pack_pair<T>(static_cast<T>(score[2 * s + 1][2]), static_cast<T>(score[2 * s + 1][3])));
    uint column = 16 * s + 2 * c;
#pragma unroll
    for (uint b = 0; b < VALUE_BLOCKS; b++) {
      uint place = column * CHUNKS + ((8 * b + r) ^ (c * 2));
      uint4 v0 = value_tile[place], v1 = value_tile[place + CHUNKS];
      uint4 v8 = value_tile[place + 8 * CHUNKS], v9 = value_tile[place + 9 * CHUNKS];
#pragma unroll
      for (uint j = 0; j < 4; j++) {
        uint a0 = j == 0 ? v0.x : j == 1 ? v0.y : j == 2 ? v0.z : v0.w, a1 = j == 0 ? v1.x : j == 1 ? v1.y : j == 2 ? v1.z : v1.w;
        uint a8 = j == 0 ? v8.x : j == 1 ? v8.y : j == 2 ? v8.z : v8.w, a9 = j == 0 ? v9.x : j == 1 ? v9.y : j == 2 ? v9.z : v9.w;
        mma_16x8x16<T>(sums[b][2 * j], p, two_words(low_halves(a0, a1), low_halves(a8, a9)), lane);
        mma_16x8x16<T>(sums[b][2 * j + 1], p, two_words(high_halves(a0, a1), high_halves(a8, a9)), lane);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
for (uint h = 0; h < 2; h++) {
  total[h] += simd_shuffle_xor(total[h], static_cast<ushort>(1));
  total[h] += simd_shuffle_xor(total[h], static_cast<ushort>(2));
  float share = total[h] > 0.0f ? 1.0f / total[h] : 0.0f;
  if (query[h] < int(L)) {
    size_t place = ((size_t(row) * HQ + head) * L + query[h]) * D;
    for (uint b = 0; b < VALUE_BLOCKS; b++) {
      for (uint half_ = 0; half_ < 2; half_++) {
        uint i = 2 * h + half_;
        uint4 words = four_words(
            pack_pair<T>(static_cast<T>(sums[b][0][i] * share), static_cast<T>(sums[b][1][i] * share)),
            pack_pair<T>(static_cast<T>(sums[b][2][i] * share), static_cast<T>(sums[b][3][i] * share)),
            pack_pair<T>(static_cast<T>(sums[b][4][i] * share), static_cast<T>(sums[b][5][i] * share)),
            pack_pair<T>(static_cast<T>(sums[b][6][i] * share), static_cast<T>(sums[b][7][i] * share)));
        *(device uint4*)(out + place + 64 * b + 16 * c + 8 * half_) = words;
      }
    }
  }
}
