// One threadgroup a chunk and value head: all that does not need the state, for all chunks at once, on tensor cores.
// T = (I + A)^-1 with A_ij = beta_i exp(c_i - c_j) k_i . k_j below the diagonal (c: summed log decay), then
// w = -T diag(beta exp(c)) K, u = T diag(beta) V and p_ij = exp(c_i - c_j) q_i . k_j up to the diagonal, each in the order of
// fragments in which `chunk_scan_mma` takes it. T is found in fp32. With SPLIT, what is rounded to bf16 is kept with its remainder, so
// that products are as good as in fp32.
constexpr int BLOCK = CHUNK / 2, PITCH = BLOCK + 8, TILES = CHUNK / 8, PAIRS = CHUNK / 16, DIMS = 8 / PAIRS, THREADS = CHUNK * 2;
constexpr int PARTS = SPLIT ? 2 : 1;
alignas(128) threadgroup char keys[CHUNK * 256];
alignas(128) threadgroup char queries[CHUNK * 256];  // then values
alignas(16) threadgroup float triangle[3][BLOCK][PITCH];  // blocks 11, 21, 22 of A, then of T
threadgroup float c[CHUNK];
threadgroup float strength[CHUNK];

uint thread_id = thread_position_in_threadgroup.x, lane = thread_index_in_simdgroup;
int simdgroup = simdgroup_index_in_threadgroup;
int n = threadgroup_position_in_grid.x, slots = (length + CHUNK - 1) / CHUNK;
int head = threadgroup_position_in_grid.y, b = head / HV, hv = head % HV, hk = hv / (HV / HK);
int first = clamp(int(spans[2 * b]), 0, int(length));
int last = clamp(int(spans[2 * b + 1]), first, int(length));
int begin = first + n * CHUNK;
if (begin >= last) return;  // the whole threadgroup
int valid = min(last - begin, CHUNK);
size_t row = size_t(b) * length + begin;
size_t chunk = size_t(head) * slots + n;

copy_tile<CHUNK, THREADS>(keys, k + (row * HK + hk) * 128, HK * 128, valid, thread_id);
copy_tile<CHUNK, THREADS>(queries, q + (row * HK + hk) * 128, HK * 128, valid, thread_id);
copies_issued();
if (simdgroup == 0) {
  constexpr int MINE = CHUNK / 32;
  float decay[MINE], sum = 0.0f;
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    int token = lane * MINE + i;
    decay[i] = token < valid ? log_decay[(row + token) * HV + hv] : 0.0f;
    sum += decay[i];
  }
  sum = simd_prefix_exclusive_sum(sum);
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    sum += decay[i];
    c[lane * MINE + i] = sum;
  }
} else if (simdgroup == 1) {
  for (int token = lane; token < CHUNK; token += 32) strength[token] = token < valid ? beta[(row + token) * HV + hv] : 0.0f;
}
wait_for_copies<0>();
threadgroup_barrier(mem_flags::mem_threadgroup);
if (thread_id < CHUNK) {
  scales[chunk * 2 * CHUNK + thread_id] = exp(c[thread_id]);
  scales[(chunk * 2 + 1) * CHUNK + thread_id] = exp(c[CHUNK - 1] - c[thread_id]);
}

int r = lane / 4, two = lane % 4 * 2;
int i0 = simdgroup * 16 + r;  // the two rows of this lane's fragments: i0 and i0 + 8
{
  float product[TILES][4];
  zero_tiles<TILES>(product[0]);
#pragma unroll
  for (int d = 0; d < 128; d += 16) {
    uint4 rows = tokens_as_rows(keys, simdgroup * 16, d, lane);
#pragma unroll
    for (int t = 0; t < TILES; t += 2) {
      if (t <= 2 * simdgroup) {
        uint4 columns = tokens_as_columns(keys, t * 8, d, lane);
        mma_pair(product[t], product[t + 1], rows, columns, lane);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    if (t <= 2 * simdgroup + 1) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        int i = i0 + e / 2 * 8, j = t * 8 + two + e % 2;
        int block = i / BLOCK + j / BLOCK;
        triangle[block][i % BLOCK][j % BLOCK] = j < i ? strength[i] * exp(c[i] - c[j]) * product[t][e] : 0.0f;
      }
    }
  }
}
{
  float product[TILES][4];
  zero_tiles<TILES>(product[0]);
#pragma unroll
  for (int d = 0; d < 128; d += 16) {
    uint4 rows = tokens_as_rows(queries, simdgroup * 16, d, lane);
#pragma unroll
    for (int t = 0; t < TILES; t += 2) {
      if (t <= 2 * simdgroup) {
        uint4 columns = tokens_as_columns(keys, t * 8, d, lane);
        mma_pair(product[t], product[t + 1], rows, columns, lane);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      int i = i0 + e / 2 * 8, j = t * 8 + two + e % 2;
      product[t][e] = j <= i ? exp(c[i] - c[j]) * product[t][e] : 0.0f;
    }
  }
  device uint4* to = (device uint4*)p + (chunk * PARTS * PAIRS * PAIRS + simdgroup) * 32 + lane;
#pragma unroll
  for (int t = 0; t < PAIRS; t++) {
    uint4 rounded = as_columns(product[2 * t], product[2 * t + 1]);
    to[t * PAIRS * 32] = rounded;
    if (SPLIT) to[(PAIRS + t) * PAIRS * 32] = rest_as_columns(product[2 * t], product[2 * t + 1], rounded);
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
copy_tile<CHUNK, THREADS>(queries, v + (row * HV + hv) * 128, HV * 128, valid, thread_id);
copies_issued();

// Blocks 11 and 22 by forward substitution, a column of the inverse in each lane's registers.
float column[BLOCK];
if (simdgroup < 2) {
  threadgroup float* block = &triangle[simdgroup * 2][0][0];
#pragma unroll
  for (int i = 0; i < BLOCK; i++) {
    float sum0 = int(lane) == i ? 1.0f : 0.0f, sum1 = 0.0f, sum2 = 0.0f, sum3 = 0.0f;
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      float4 a = *(const threadgroup float4*)(block + i * PITCH + j);
      sum0 -= a.x * column[j];
      if (j + 1 < i) sum1 -= a.y * column[j + 1];
      if (j + 2 < i) sum2 -= a.z * column[j + 2];
      if (j + 3 < i) sum3 -= a.w * column[j + 3];
    }
    column[i] = (sum0 + sum1) + (sum2 + sum3);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int i = 0; i < BLOCK; i++) {
    if (lane < BLOCK) block[i * PITCH + lane] = column[i];
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
// Block 21 is -T22 A21 T11; a thread computes eight of a column's values each time.
{
  int at = min(int(lane), BLOCK - 1);
  float part[8];
#pragma unroll
  for (int i = 0; i < 8; i++) part[i] = 0.0f;
  for (int j = 0; j < BLOCK; j++) {
    float right = triangle[0][j][at];
#pragma unroll
    for (int i = 0; i < 8; i++) part[i] += triangle[1][simdgroup * 8 + i][j] * right;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if (lane < BLOCK) triangle[1][simdgroup * 8 + i][lane] = part[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int i = 0; i < 8; i++) part[i] = 0.0f;
  for (int j = 0; j < BLOCK; j++) {
    float right = triangle[1][j][at];
#pragma unroll
    for (int i = 0; i < 8; i++) part[i] -= triangle[2][simdgroup * 8 + i][j] * right;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    if (lane < BLOCK) triangle[1][simdgroup * 8 + i][lane] = part[i];
  }
}
wait_for_copies<0>();
threadgroup_barrier(mem_flags::mem_threadgroup);

{
  float product[16][4];
  zero_tiles<16>(product[0]);
#pragma unroll
  for (int t = 0; t < PAIRS; t++) {
    if (t <= simdgroup) {
      float one[4], two_more[4];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        int i = i0 + e / 2 * 8, j = t * 16 + two + e % 2;
        float factor = -strength[j] * exp(c[j]), other = -strength[j + 8] * exp(c[j + 8]);
        one[e] = factor * triangle[i / BLOCK + j / BLOCK][i % BLOCK][j % BLOCK];
        two_more[e] = other * triangle[i / BLOCK + j / BLOCK][i % BLOCK][j % BLOCK + 8];
      }
      uint4 a = as_rows(one, two_more), rest = rest_as_rows(one, two_more, a);
#pragma unroll
      for (int d = 0; d < 16; d += 2) {
        uint4 columns = tokens_as_k(keys, t * 16, d * 8, lane);
        mma_pair(product[d], product[d + 1], a, columns, lane);
        if (SPLIT) mma_pair(product[d], product[d + 1], rest, columns, lane);
      }
    }
  }
  device uint4* to = (device uint4*)w + (chunk * PARTS * 8 * PAIRS + simdgroup) * 32 + lane;
#pragma unroll
  for (int d = 0; d < 8; d++) {
    uint4 rounded = as_columns(product[2 * d], product[2 * d + 1]);
    to[d * PAIRS * 32] = rounded;
    if (SPLIT) to[(8 + d) * PAIRS * 32] = rest_as_columns(product[2 * d], product[2 * d + 1], rounded);
  }
}
{
  float product[DIMS][TILES][4];
  zero_tiles<DIMS * TILES>(product[0][0]);
#pragma unroll
  for (int t = 0; t < PAIRS; t++) {
    uint4 rows[DIMS];
#pragma unroll
    for (int d = 0; d < DIMS; d++) rows[d] = dims_as_rows(queries, t * 16, (simdgroup * DIMS + d) * 16, lane);
#pragma unroll
    for (int i = 2 * t; i < TILES; i++) {
      uint columns[2], rest[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        int token = i * 8 + r, j = t * 16 + two + e * 8;
        float2 pair = *(const threadgroup float2*)&triangle[token / BLOCK + j / BLOCK][token % BLOCK][j % BLOCK];
        float one = pair.x * strength[j], two_more = pair.y * strength[j + 1];
        columns[e] = pack_bf16(one, two_more);
        rest[e] = pack_bf16(one - low_bf16(columns[e]), two_more - high_bf16(columns[e]));
      }
#pragma unroll
      for (int d = 0; d < DIMS; d++) {
        mma_bf16(product[d][i], rows[d], columns[0], columns[1], lane);
        if (SPLIT) mma_bf16(product[d][i], rows[d], rest[0], rest[1], lane);
      }
    }
  }
  device float4* to = (device float4*)u + (chunk * 8 + simdgroup * DIMS) * TILES * 32 + lane;
#pragma unroll
  for (int d = 0; d < DIMS; d++) {
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      float4 values;
#pragma unroll
      for (int e = 0; e < 4; e++) values[e] = product[d][t][e];
      to[(d * TILES + t) * 32] = values;
    }
  }
}
