// A simdgroup takes one head of one token: its values stay in registers from the load to the rotation. Only the rotary part
// passes through threadgroup memory, where each value finds the other one of its pair.
constexpr int VALUES = (D + 31) / 32;
threadgroup float rotary[THREADS / 32][ROTARY > 0 ? ROTARY : 1];
uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
uint row = threadgroup_position_in_grid.x * (THREADS / 32) + simdgroup;
uint token = row / (HQ + HK), head = row % (HQ + HK);
if (token < uint(N)) {
  bool is_query = head < HQ;
  constexpr int STRIDE = GATED ? 2 * D : D;
  float v[VALUES];
  float sum = 0.0f;
  for (int i = 0; i < VALUES; i++) {
    uint d = lane + 32 * i;
    v[i] = 0.0f;
    if (d < D) {
      v[i] = is_query ? static_cast<float>(queries[(size_t(token) * HQ + head) * STRIDE + d])
                      : static_cast<float>(keys[(size_t(token) * HK + head - HQ) * D + d]);
    }
    sum += v[i] * v[i];
  }
  float scale = metal::precise::rsqrt(simd_sum(sum) / D + eps);
  for (int i = 0; i < VALUES; i++) {
    uint d = lane + 32 * i;
    if (d < D) {
      v[i] *= scale * (is_query ? static_cast<float>(q_weight[d]) : static_cast<float>(k_weight[d]));
      if (d < ROTARY) rotary[simdgroup][d] = v[i];
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  uint b = token / uint(L), l = token % uint(L);
  float position = static_cast<float>(PER_TOKEN ? positions[token] : positions[b] + int(l));
  for (int i = 0; i < VALUES; i++) {
    uint d = lane + 32 * i;
    if (d < D) {
      float y = v[i];
      if (d < ROTARY) {
        constexpr uint HALF = ROTARY / 2;
        bool low = d < HALF;
        float angle = position * inverse_frequency[low ? d : d - HALF];
        float other = rotary[simdgroup][low ? d + HALF : d - HALF];
        float c = metal::precise::cos(angle), s = metal::precise::sin(angle);
        y = low ? y * c - other * s : other * s + y * c;
      }
      if (is_query) q[((size_t(b) * HQ + head) * L + l) * D + d] = static_cast<T>(y);
      else k[((size_t(b) * HK + head - HQ) * L + l) * D + d] = static_cast<T>(y);
    }
  }
}
