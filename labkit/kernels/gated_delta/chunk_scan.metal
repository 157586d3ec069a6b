// A simdgroup carries 8 ROWS columns of a head's state S [8 ROWS x DK] in matrices through the chunks; nothing is exchanged between
// simdgroups. All is transposed, so that what one product gives is what the next one takes:
//   v' = u + S w,  y = exp(c) S q + v' p,  S <- exp(c_last) S + (v' exp(c_last - c)) k
constexpr int CHUNK = 32, TILES = CHUNK / 8, DIMS = DK / 8;
uint lane = thread_index_in_simdgroup;
int head = threadgroup_position_in_grid.y, b = head / HV, hv = head % HV, hk = hv / (HV / HK);
int column0 = (threadgroup_position_in_grid.x * SIMDGROUPS + simdgroup_index_in_threadgroup) * 8 * ROWS;
int first = clamp(int(spans[2 * b]), 0, int(length));
int last = clamp(int(spans[2 * b + 1]), first, int(length));
int slots = (length + CHUNK - 1) / CHUNK;
size_t row = size_t(b) * length;
auto all_q = q + (row * HK + hk) * DK;
auto all_k = k + (row * HK + hk) * DK;
auto all_y = y + (row * HV + hv) * DV + column0;
size_t state_at = (size_t(head) * DV + column0) * DK;

for (int i = lane; i < length * 8 * ROWS; i += 32) {
  int t = i / (8 * ROWS);
  if (t < first || t >= last) all_y[size_t(t) * HV * DV + i % (8 * ROWS)] = static_cast<T>(0.0f);
}

simdgroup_float8x8 s[ROWS][DIMS];
#pragma unroll
for (int r = 0; r < ROWS; r++) {
#pragma unroll
  for (int d = 0; d < DIMS; d++) simdgroup_load(s[r][d], state + state_at + r * 8 * DK + d * 8, DK);
}

for (int begin = first; begin < last; begin += CHUNK) {
  size_t chunk = size_t(head) * slots + (begin - first) / CHUNK;
  const device float* into = scales + chunk * 2 * CHUNK;
  simdgroup_float8x8 fresh[ROWS][TILES], out[ROWS][TILES];
#pragma unroll
  for (int t = 0; t < TILES; t++) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      simdgroup_load(fresh[r][t], u + (chunk * CHUNK + t * 8) * DV + column0 + r * 8, DV, ulong2(0), true);
      out[r][t] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    auto q_rows = all_q + size_t(begin + t * 8) * HK * DK;
#pragma unroll
    for (int d = 0; d < DIMS; d++) {
      simdgroup_float8x8 across;
      simdgroup_load(across, w + (chunk * CHUNK + t * 8) * DK + d * 8, DK, ulong2(0), true);
      simdgroup_float8x8 query = load_tokens_across(q_rows + d * 8, HK * DK, last - begin - t * 8, lane);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        simdgroup_multiply_accumulate(fresh[r][t], s[r][d], across, fresh[r][t]);
        simdgroup_multiply_accumulate(out[r][t], s[r][d], query, out[r][t]);
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int e = 0; e < 2; e++) out[r][t].thread_elements()[e] *= into[t * 8 + matrix_column(lane) + e];
    }
#pragma unroll
    for (int j = 0; j <= t; j++) {
      simdgroup_float8x8 across;
      simdgroup_load(across, p + (chunk * CHUNK + t * 8) * CHUNK + j * 8, CHUNK, ulong2(0), true);
#pragma unroll
      for (int r = 0; r < ROWS; r++) simdgroup_multiply_accumulate(out[r][t], fresh[r][j], across, out[r][t]);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        int token = begin + t * 8 + matrix_column(lane) + e;
        if (token < last) {
          all_y[size_t(token) * HV * DV + r * 8 + matrix_row(lane)] = static_cast<T>(out[r][t].thread_elements()[e]);
        }
      }
    }
  }
  float kept = into[CHUNK - 1];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
#pragma unroll
    for (int d = 0; d < DIMS; d++) {
#pragma unroll
      for (int e = 0; e < 2; e++) s[r][d].thread_elements()[e] *= kept;
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
#pragma unroll
      for (int e = 0; e < 2; e++) fresh[r][t].thread_elements()[e] *= into[CHUNK + t * 8 + matrix_column(lane) + e];
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    auto k_rows = all_k + size_t(begin + t * 8) * HK * DK;
#pragma unroll
    for (int d = 0; d < DIMS; d++) {
      simdgroup_float8x8 key = load_tokens(k_rows + d * 8, HK * DK, last - begin - t * 8, lane);
#pragma unroll
      for (int r = 0; r < ROWS; r++) simdgroup_multiply_accumulate(s[r][d], fresh[r][t], key, s[r][d]);
    }
  }
}

#pragma unroll
for (int r = 0; r < ROWS; r++) {
#pragma unroll
  for (int d = 0; d < DIMS; d++) simdgroup_store(s[r][d], state_out + state_at + r * 8 * DK + d * 8, DK);
}
