// One threadgroup a chunk and value head: all that does not need the state, for all chunks at once. A simdgroup takes eight of
// the chunk's 32 tokens. With A_ij = beta_i exp(c_i - c_j) k_i . k_j below the diagonal (c: summed log decay) and T = (I + A)^-1:
// w = -T diag(beta exp(c)) K, u = T diag(beta) V and p_ij = exp(c_i - c_j) q_i . k_j up to the diagonal.
constexpr int CHUNK = 32, TILES = CHUNK / 8;
threadgroup float keys[CHUNK * DK];
threadgroup float triangle[CHUNK * CHUNK];  // A, then T
threadgroup float c[CHUNK];
threadgroup float strength[CHUNK];

uint lane = thread_index_in_simdgroup;
int thread_id = thread_position_in_threadgroup.x, m = simdgroup_index_in_threadgroup;
int n = threadgroup_position_in_grid.x, slots = (length + CHUNK - 1) / CHUNK;
int head = threadgroup_position_in_grid.y, b = head / HV, hv = head % HV, hk = hv / (HV / HK);
int first = clamp(int(spans[2 * b]), 0, int(length));
int last = clamp(int(spans[2 * b + 1]), first, int(length));
int begin = first + n * CHUNK;
if (begin >= last) return;  // the whole threadgroup
int valid = min(last - begin, CHUNK);
size_t row = size_t(b) * length + begin;
size_t chunk = size_t(head) * slots + n;

for (int i = thread_id; i < CHUNK * DK; i += 32 * TILES) {
  int token = i / DK;
  keys[i] = token < valid ? static_cast<float>(k[((row + token) * HK + hk) * DK + i % DK]) : 0.0f;
}
if (m == 0) {
  int token = lane;
  c[token] = simd_prefix_inclusive_sum(token < valid ? log_decay[(row + token) * HV + hv] : 0.0f);
  strength[token] = token < valid ? beta[(row + token) * HV + hv] : 0.0f;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (thread_id < CHUNK) {
  scales[chunk * 2 * CHUNK + thread_id] = exp(c[thread_id]);
  scales[(chunk * 2 + 1) * CHUNK + thread_id] = exp(c[CHUNK - 1] - c[thread_id]);
}

int i = m * 8 + matrix_row(lane);  // this lane's token
auto q_rows = q + ((row + m * 8) * HK + hk) * DK;
for (int t = 0; t < TILES; t++) {
  simdgroup_float8x8 keys_keys = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_float8x8 queries_keys = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  if (t <= m) {
    for (int d = 0; d < DK; d += 8) {
      simdgroup_float8x8 key, across;
      simdgroup_load(key, keys + m * 8 * DK + d, DK);
      simdgroup_load(across, keys + t * 8 * DK + d, DK, ulong2(0), true);
      simdgroup_float8x8 query = load_tokens(q_rows + d, HK * DK, valid - m * 8, lane);
      simdgroup_multiply_accumulate(keys_keys, key, across, keys_keys);
      simdgroup_multiply_accumulate(queries_keys, query, across, queries_keys);
    }
  }
#pragma unroll
  for (int e = 0; e < 2; e++) {
    int j = t * 8 + matrix_column(lane) + e;
    float decay = exp(min(c[i] - c[j], 0.0f));
    triangle[i * CHUNK + j] = j < i ? strength[i] * decay * keys_keys.thread_elements()[e] : 0.0f;
    p[(chunk * CHUNK + i) * CHUNK + j] = j <= i ? decay * queries_keys.thread_elements()[e] : 0.0f;
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

// Forward substitution: a column of the inverse in each lane's registers.
if (m == 0) {
  float column[CHUNK];
#pragma unroll
  for (int i = 0; i < CHUNK; i++) {
    float sum = int(lane) == i ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < i; j++) sum = fma(-triangle[i * CHUNK + j], column[j], sum);
    column[i] = sum;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int i = 0; i < CHUNK; i++) triangle[i * CHUNK + lane] = column[i];
}
threadgroup_barrier(mem_flags::mem_threadgroup);

simdgroup_float8x8 for_w[TILES], for_u[TILES];
#pragma unroll
for (int t = 0; t < TILES; t++) {
#pragma unroll
  for (int e = 0; e < 2; e++) {
    int j = t * 8 + matrix_column(lane) + e;
    float value = triangle[i * CHUNK + j] * strength[j];
    for_w[t].thread_elements()[e] = -value * exp(c[j]);
    for_u[t].thread_elements()[e] = value;
  }
}
for (int d = 0; d < DK; d += 8) {
  simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    simdgroup_float8x8 key;
    simdgroup_load(key, keys + t * 8 * DK + d, DK);
    if (t <= m) simdgroup_multiply_accumulate(sum, for_w[t], key, sum);
  }
  simdgroup_store(sum, w + (chunk * CHUNK + m * 8) * DK + d, DK);
}
auto v_rows = v + (row * HV + hv) * DV;
for (int d = 0; d < DV; d += 8) {
  simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    simdgroup_float8x8 value = load_tokens(v_rows + size_t(t) * 8 * HV * DV + d, HV * DV, valid - t * 8, lane);
    if (t <= m) simdgroup_multiply_accumulate(sum, for_u[t], value, sum);
  }
  simdgroup_store(sum, u + (chunk * CHUNK + m * 8) * DV + d, DV);
}
