// A simdgroup takes one row of D values, which stay in its registers between the sum of squares and the scaling.
constexpr int PARTS = (D + 32 * VEC - 1) / (32 * VEC);
uint lane = thread_index_in_simdgroup;
uint row = threadgroup_position_in_grid.x * (THREADS / 32) + simdgroup_index_in_threadgroup;
if (row < uint(N)) {
  size_t gates = size_t(row / H) * WIDTH + START + row % H * D;
  float v[PARTS * VEC], gate[PARTS * VEC];
  float sum = 0.0f;
  for (int i = 0; i < PARTS; i++) {
    uint d = (lane + 32 * i) * VEC;
    for (int j = 0; j < VEC; j++) v[i * VEC + j] = 0.0f;
    if (d < D) {
      Values<VEC, T>::load(x + size_t(row) * D + d, v + i * VEC);
      Values<VEC, T>::load(z + gates + d, gate + i * VEC);
    }
    for (int j = 0; j < VEC; j++) sum += v[i * VEC + j] * v[i * VEC + j];
  }
  float scale = metal::precise::rsqrt(simd_sum(sum) / D + eps);
  for (int i = 0; i < PARTS; i++) {
    uint d = (lane + 32 * i) * VEC;
    if (d < D) {
      for (int j = 0; j < VEC; j++) {
        float silu = gate[i * VEC + j] / (1.0f + metal::precise::exp(-gate[i * VEC + j]));
        v[i * VEC + j] *= scale * static_cast<float>(weight[d + j]) * silu;
      }
      Values<VEC, T>::store(out + size_t(row) * D + d, v + i * VEC);
    }
  }
}
