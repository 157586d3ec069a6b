// A simdgroup takes one head of one token: [B, H, L, D] in, [B, L, H * D] out, the gate read where the projection left it.
uint row = threadgroup_position_in_grid.x * (THREADS / 32) + simdgroup_index_in_threadgroup;
uint token = row / H, head = row % H;
if (token < uint(N)) {
  uint b = token / uint(L), l = token % uint(L);
  size_t from = ((size_t(b) * H + head) * L + l) * D;
  for (uint d = thread_index_in_simdgroup * VEC; d < D; d += 32 * VEC) {
    float gate[VEC], y[VEC];
    Values<VEC, T>::load(q_gate + (size_t(row) * 2 + 1) * D + d, gate);
    Values<VEC, T>::load(attended + from + d, y);
    for (int j = 0; j < VEC; j++) y[j] = y[j] / (1.0f + metal::precise::exp(-gate[j]));
    Values<VEC, T>::store(out + size_t(row) * D + d, y);
  }
}
