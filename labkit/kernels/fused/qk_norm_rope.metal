// A simdgroup takes one head of one token: its values stay in registers from the load to the rotation. Only the rotary part
// passes through threadgroup memory, where each value finds the other one of its pair.
constexpr int PARTS = (D + 32 * VEC - 1) / (32 * VEC);
constexpr uint HALF = ROTARY / 2;
threadgroup float rotary[THREADS / 32][ROTARY > 0 ? ROTARY : 1];
uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
uint row = threadgroup_position_in_grid.x * (THREADS / 32) + simdgroup;
uint token = row / (HQ + HK), head = row % (HQ + HK);
if (token < uint(N)) {
  bool is_query = head < HQ;
  size_t from = is_query ? (size_t(token) * HQ + head) * (GATED ? 2 * D : D) : (size_t(token) * HK + head - HQ) * D;
  float v[PARTS * VEC];
  float sum = 0.0f;
  for (int i = 0; i < PARTS; i++) {
    uint d = (lane + 32 * i) * VEC;
    for (int j = 0; j < VEC; j++) v[i * VEC + j] = 0.0f;
    if (d < D) {
      if (is_query) Values<VEC, T>::load(queries + from + d, v + i * VEC);
      else Values<VEC, T>::load(keys + from + d, v + i * VEC);
    }
    for (int j = 0; j < VEC; j++) sum += v[i * VEC + j] * v[i * VEC + j];
  }
  float scale = metal::precise::rsqrt(simd_sum(sum) / D + eps);
  for (int i = 0; i < PARTS; i++) {
    for (uint j = 0; j < VEC; j++) {
      uint d = (lane + 32 * i) * VEC + j;
      if (d < D) {
        float weight = is_query ? static_cast<float>(q_weight[d]) : static_cast<float>(k_weight[d]);
        v[i * VEC + j] *= scale * weight;
        if (d < ROTARY) rotary[simdgroup][d] = v[i * VEC + j];
      }
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  uint b = token / uint(L), l = token % uint(L);
  float position = static_cast<float>(PER_TOKEN ? positions[token] : positions[b] + int(l));
  size_t to = is_query ? ((size_t(b) * HQ + head) * L + l) * D : ((size_t(b) * HK + head - HQ) * L + l) * D;
  for (int i = 0; i < PARTS; i++) {
    uint first = (lane + 32 * i) * VEC;
    for (uint j = 0; j < VEC; j++) {
      uint d = first + j;
      if (d < ROTARY) {
        bool low = d < HALF;
        float angle = position * inverse_frequency[low ? d : d - HALF];
        float y = v[i * VEC + j], other = rotary[simdgroup][low ? d + HALF : d - HALF];
        float c = metal::precise::cos(angle), s = metal::precise::sin(angle);
        v[i * VEC + j] = low ? y * c - other * s : other * s + y * c;
      }
    }
    if (first < D) {
      if (is_query) Values<VEC, T>::store(q + to + first, v + i * VEC);
      else Values<VEC, T>::store(k + to + first, v + i * VEC);
    }
  }
}
