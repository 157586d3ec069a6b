// A simdgroup takes one head of one token.
threadgroup float rotary[THREADS / 32][ROTARY > 0 ? 2 * ROTARY : 1];
uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
uint row = threadgroup_position_in_grid.x * (THREADS / 32) + simdgroup;
uint token = row / (HQ + HK), head = row % (HQ + HK);
if (token < uint(N)) {
  uint b = token / uint(L), l = token % uint(L);
  float position = static_cast<float>(PER_TOKEN ? positions[token] : positions[b] + int(l));
  if (head < HQ) {
    auto from = queries + (size_t(token) * HQ + head) * (GATED ? 2 * D : D);
    auto to = q + ((size_t(b) * HQ + head) * L + l) * D;
    rotate_head<T, D, ROTARY, VEC>(from, q_weight, inverse_frequency, position, eps, rotary[simdgroup], lane, to);
  } else {
    auto from = keys + (size_t(token) * HK + head - HQ) * D;
    auto to = k + ((size_t(b) * HK + head - HQ) * L + l) * D;
    rotate_head<T, D, ROTARY, VEC>(from, k_weight, inverse_frequency, position, eps, rotary[simdgroup], lane, to);
  }
}
