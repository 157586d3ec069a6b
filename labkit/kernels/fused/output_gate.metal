// A simdgroup takes one head of one token: [B, H, L, D] in, [B, L, H * D] out, the gate read where the projection left it.
uint lane = thread_index_in_simdgroup;
uint row = threadgroup_position_in_grid.x * (THREADS / 32) + simdgroup_index_in_threadgroup;
uint token = row / H, head = row % H;
if (token < uint(N)) {
  uint b = token / uint(L), l = token % uint(L);
  for (uint d = lane; d < D; d += 32) {
    float gate = static_cast<float>(q_gate[(size_t(row) * 2 + 1) * D + d]);
    float y = static_cast<float>(attended[((size_t(b) * H + head) * L + l) * D + d]);
    out[size_t(row) * D + d] = static_cast<T>(y / (1.0f + metal::precise::exp(-gate)));
  }
}
