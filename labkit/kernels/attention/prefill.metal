// A chunk of new tokens against all columns before them, over simdgroup matrices, for any float. Scores live in registers
// alone. A simdgroup owns 8 queries of one head; a threadgroup's simdgroups share tiles of KEYS columns.
constexpr uint PITCH = D + 16 / sizeof(T);  // elements of a staged row: 16 bytes more, against bank conflicts
alignas(16) threadgroup T key_tile[KEYS * PITCH];
alignas(16) threadgroup T value_tile[KEYS * PITCH];

uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup, t = thread_index_in_threadgroup;
// Where the two adjacent elements of an 8x8 matrix lie that a lane holds, as MLX's own kernels have it.
uint down = (lane / 4 & 4) + lane / 2 % 4, across = (lane / 4 & 2) * 2 + lane % 2 * 2;
uint head = threadgroup_position_in_grid.y, row = threadgroup_position_in_grid.z;
// The last queries see most columns: they start first.
uint tile = threadgroups_per_grid.x - 1 - threadgroup_position_in_grid.x;
int first_query = int(tile * 8 * SIMDS);
int query = first_query + int(8 * simd + down);
int origin = start[row], lowest = first[row];
int end = min(origin + min(first_query + int(8 * SIMDS), int(L)), int(S));
int begin = max(lowest, 0);  // tiles begin with the row's first column, so that padding does not move their borders

simdgroup_matrix<T, 8, 8> q[D / 8];
simdgroup_matrix<float, 8, 8> sums[D / 8];
auto mine = queries + ((size_t(row) * HQ + head) * L + min(query, int(L) - 1)) * D + across;
for (uint i = 0; i < D / 8; i++) {
  q[i].thread_elements()[0] = mine[8 * i];
  q[i].thread_elements()[1] = mine[8 * i + 1];
  sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}
float top = -INFINITY, total = 0.0f, factor = scale * M_LOG2E_F;
size_t head_start = (size_t(row) * HKV + head / (HQ / HKV)) * size_t(S) * D;

for (int block = begin; block < end; block += int(KEYS)) {
  for (uint item = t; item < KEYS * D / 4; item += SIMDS * 32) {
    uint column = item / (D / 4), e = item % (D / 4) * 4;
    size_t from = head_start + size_t(min(block + int(column), int(S) - 1)) * D + e;
    *(threadgroup vec<T, 4>*)(key_tile + column * PITCH + e) = *(const device vec<T, 4>*)(keys + from);
    *(threadgroup vec<T, 4>*)(value_tile + column * PITCH + e) = *(const device vec<T, 4>*)(values + from);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_matrix<float, 8, 8> score[KEYS / 8];
  float highest = top;
  for (uint n = 0; n < KEYS / 8; n++) {
    score[n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (uint i = 0; i < D / 8; i++) {
      simdgroup_matrix<T, 8, 8> k;
      simdgroup_load(k, key_tile + 8 * n * PITCH + 8 * i, PITCH, ulong2(0), true);
      simdgroup_multiply_accumulate(score[n], q[i], k, score[n]);
    }
    for (uint e = 0; e < 2; e++) {
      int column = block + int(8 * n + across + e);
      bool sees = column >= lowest && column <= origin + query && column < int(S);
      score[n].thread_elements()[e] = sees ? score[n].thread_elements()[e] * factor : -INFINITY;
      highest = max(highest, score[n].thread_elements()[e]);
    }
  }
  // Lanes of one row of the matrix differ in bits 0 and 3.
  highest = max(highest, simd_shuffle_xor(highest, static_cast<ushort>(1)));
  highest = max(highest, simd_shuffle_xor(highest, static_cast<ushort>(8)));
  // A query that has seen nothing yet keeps its zeros.
  float base = highest == -INFINITY ? 0.0f : highest, keep = exp2(top - base);
  top = highest;
  total *= keep;
  for (uint i = 0; i < D / 8; i++) {
    sums[i].thread_elements()[0] *= keep;
    sums[i].thread_elements()[1] *= keep;
  }
  for (uint n = 0; n < KEYS / 8; n++) {
    simdgroup_matrix<T, 8, 8> p;
    for (uint e = 0; e < 2; e++) {
      float weight = exp2(score[n].thread_elements()[e] - base);
      total += weight;
      p.thread_elements()[e] = static_cast<T>(weight);
    }
    for (uint i = 0; i < D / 8; i++) {
      simdgroup_matrix<T, 8, 8> v;
      simdgroup_load(v, value_tile + 8 * n * PITCH + 8 * i, PITCH);
      simdgroup_multiply_accumulate(sums[i], p, v, sums[i]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
total += simd_shuffle_xor(total, static_cast<ushort>(1));
total += simd_shuffle_xor(total, static_cast<ushort>(8));
float share = total > 0.0f ? 1.0f / total : 0.0f;
if (query < int(L)) {
  auto to = out + ((size_t(row) * HQ + head) * L + query) * D + across;
  for (uint i = 0; i < D / 8; i++) {
    to[8 * i] = static_cast<T>(sums[i].thread_elements()[0] * share);
    to[8 * i + 1] = static_cast<T>(sums[i].thread_elements()[1] * share);
  }
}
