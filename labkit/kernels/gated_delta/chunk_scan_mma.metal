// A simdgroup carries 16 columns of a head's state S [16 x 128] through the chunks as accumulators of tensor cores; nothing is
// exchanged between simdgroups. All is transposed, so that what one product gives is what the next one takes:
//   v' = u + S w,  y = exp(c) S q + v' p,  S <- exp(c_last) S + (v' exp(c_last - c)) k
// Threadgroup memory holds w, q and k of the chunk at hand; each is refilled for the next while the others are in use.
constexpr int TILES = CHUNK / 8, PAIRS = CHUNK / 16, BYTES = CHUNK * 256, THREADS = SIMDGROUPS * 32;
constexpr int PARTS = SPLIT ? 2 : 1;
alignas(128) threadgroup char tile_w[BYTES];
alignas(128) threadgroup char tile_q[BYTES];
alignas(128) threadgroup char tile_k[BYTES];

uint thread_id = thread_position_in_threadgroup.x, lane = thread_index_in_simdgroup;
int simdgroup = simdgroup_index_in_threadgroup;
int head = threadgroup_position_in_grid.y, b = head / HV, hv = head % HV, hk = hv / (HV / HK);
int column0 = (threadgroup_position_in_grid.x * SIMDGROUPS + simdgroup) * 16;
int first = clamp(int(spans[2 * b]), 0, int(length));
int last = clamp(int(spans[2 * b + 1]), first, int(length));
int chunks = (last - first + CHUNK - 1) / CHUNK, slots = (length + CHUNK - 1) / CHUNK;
size_t row = size_t(b) * length;
int r = lane / 4, two = lane % 4 * 2;
const device char* all_w = (const device char*)w + size_t(head) * slots * PARTS * BYTES;
auto all_q = q + (row * HK + hk) * 128;
auto all_k = k + (row * HK + hk) * 128;
auto all_y = y + (row * HV + hv) * 128;

for (int t = thread_id; t < length; t += THREADS) {
  if (t < first || t >= last) {
    device uint4* to = (device uint4*)(all_y + size_t(t) * HV * 128 + threadgroup_position_in_grid.x * SIMDGROUPS * 16);
#pragma unroll
    for (int i = 0; i < SIMDGROUPS * 2; i++) to[i] = uint4(0);
  }
}

float s[16][4];
auto from_state = state + (size_t(head) * 128 + column0 + r) * 128 + two;
#pragma unroll
for (int d = 0; d < 16; d++) {
#pragma unroll
  for (int e = 0; e < 2; e++) {
    float2 pair = *(const device float2*)(from_state + e * 8 * 128 + d * 8);
    s[d][2 * e] = pair.x;
    s[d][2 * e + 1] = pair.y;
  }
}

if (chunks > 0) {
  copy_piece<BYTES, THREADS>(tile_w, all_w, thread_id);
  copies_issued();
  copy_tile<CHUNK, THREADS>(tile_q, all_q + size_t(first) * HK * 128, HK * 128, last - first, thread_id);
}
copies_issued();

for (int n = 0; n < chunks; n++) {
  size_t chunk = size_t(head) * slots + n;
  int begin = first + n * CHUNK, next = begin + CHUNK;
  const device float* into = scales + chunk * 2 * CHUNK;
  const device float4* from_u = (const device float4*)u + (chunk * 8 + column0 / 16) * TILES * 32 + lane;
  float v[TILES][4];
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    float4 four = from_u[t * 32];
#pragma unroll
    for (int e = 0; e < 4; e++) v[t][e] = four[e];
  }

  wait_for_copies<1>();
  threadgroup_barrier(mem_flags::mem_threadgroup);
  copy_tile<CHUNK, THREADS>(tile_k, all_k + size_t(begin) * HK * 128, HK * 128, last - begin, thread_id);
  copies_issued();
#pragma unroll
  for (int d = 0; d < 8; d++) {
    uint4 rows = as_rows(s[2 * d], s[2 * d + 1]);
    uint4 rest = rest_as_rows(s[2 * d], s[2 * d + 1], rows);
#pragma unroll
    for (int t = 0; t < PAIRS; t++) {
      uint4 columns = *(const threadgroup uint4*)(tile_w + ((d * PAIRS + t) * 32 + lane) * 16);
      mma_pair(v[2 * t], v[2 * t + 1], rows, columns, lane);
      if (SPLIT) {
        uint4 low = *(const device uint4*)(all_w + (size_t(n) * PARTS + 1) * BYTES + ((d * PAIRS + t) * 32 + lane) * 16);
        mma_pair(v[2 * t], v[2 * t + 1], rest, columns, lane);
        mma_pair(v[2 * t], v[2 * t + 1], rows, low, lane);
      }
    }
  }

  wait_for_copies<1>();
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (next < last) copy_piece<BYTES, THREADS>(tile_w, all_w + size_t(n + 1) * PARTS * BYTES, thread_id);
  copies_issued();
  float o[TILES][4];
  zero_tiles<TILES>(o[0]);
#pragma unroll
  for (int d = 0; d < 8; d++) {
    uint4 rows = as_rows(s[2 * d], s[2 * d + 1]);
    uint4 rest = rest_as_rows(s[2 * d], s[2 * d + 1], rows);
#pragma unroll
    for (int t = 0; t < PAIRS; t++) {
      uint4 columns = tokens_as_columns(tile_q, t * 16, d * 16, lane);
      mma_pair(o[2 * t], o[2 * t + 1], rows, columns, lane);
      if (SPLIT) mma_pair(o[2 * t], o[2 * t + 1], rest, columns, lane);
    }
  }
  scale_columns<TILES>(o[0], into, two);
  const device uint4* from_p = (const device uint4*)p + chunk * PARTS * PAIRS * PAIRS * 32 + lane;
#pragma unroll
  for (int j = 0; j < PAIRS; j++) {
    uint4 rows = as_rows(v[2 * j], v[2 * j + 1]);
    uint4 rest = rest_as_rows(v[2 * j], v[2 * j + 1], rows);
#pragma unroll
    for (int t = j; t < PAIRS; t++) {
      uint4 columns = from_p[(j * PAIRS + t) * 32];
      mma_pair(o[2 * t], o[2 * t + 1], rows, columns, lane);
      if (SPLIT) {
        mma_pair(o[2 * t], o[2 * t + 1], rest, columns, lane);
        mma_pair(o[2 * t], o[2 * t + 1], rows, from_p[((PAIRS + j) * PAIRS + t) * 32], lane);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    uint upper = transpose_matrix(pack_bf16(o[t][0], o[t][1]), lane);
    uint lower = transpose_matrix(pack_bf16(o[t][2], o[t][3]), lane);
    int token = begin + t * 8 + r;
    if (token < last) {
      device uint* to = (device uint*)(all_y + size_t(token) * HV * 128 + column0 + two);
      to[0] = upper;
      to[4] = lower;
    }
  }

  wait_for_copies<1>();
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (next < last) {
    copy_tile<CHUNK, THREADS>(tile_q, all_q + size_t(next) * HK * 128, HK * 128, last - next, thread_id);
  }
  copies_issued();
  float kept = into[CHUNK - 1];
#pragma unroll
  for (int d = 0; d < 16; d++) {
#pragma unroll
    for (int e = 0; e < 4; e++) s[d][e] *= kept;
  }
  scale_columns<TILES>(v[0], into + CHUNK, two);
#pragma unroll
  for (int j = 0; j < PAIRS; j++) {
    uint4 rows = as_rows(v[2 * j], v[2 * j + 1]);
    uint4 rest = rest_as_rows(v[2 * j], v[2 * j + 1], rows);
#pragma unroll
    for (int d = 0; d < 8; d++) {
      uint4 columns = tokens_as_k(tile_k, j * 16, d * 16, lane);
      mma_pair(s[2 * d], s[2 * d + 1], rows, columns, lane);
      if (SPLIT) mma_pair(s[2 * d], s[2 * d + 1], rest, columns, lane);
    }
  }
}

auto to_state = state_out + (size_t(head) * 128 + column0 + r) * 128 + two;
#pragma unroll
for (int d = 0; d < 16; d++) {
#pragma unroll
  for (int e = 0; e < 2; e++) {
    float2 pair;
    pair.x = s[d][2 * e];
    pair.y = s[d][2 * e + 1];
    *(device float2*)(to_state + e * 8 * 128 + d * 8) = pair;
  }
}
