// A simdgroup takes one row of D values, which stay in its registers between the sum of squares and the scaling.
constexpr int VALUES = (D + 31) / 32;
uint lane = thread_index_in_simdgroup;
uint row = threadgroup_position_in_grid.x * (THREADS / 32) + simdgroup_index_in_threadgroup;
if (row < uint(N)) {
  float v[VALUES];
  float sum = 0.0f;
  for (int i = 0; i < VALUES; i++) {
    uint d = lane + 32 * i;
    v[i] = d < D ? static_cast<float>(x[size_t(row) * D + d]) : 0.0f;
    sum += v[i] * v[i];
  }
  float scale = metal::precise::rsqrt(simd_sum(sum) / D + eps);
  size_t gates = size_t(row / H) * WIDTH + START + row % H * D;
  for (int i = 0; i < VALUES; i++) {
    uint d = lane + 32 * i;
    if (d < D) {
      float gate = static_cast<float>(z[gates + d]);
      float silu = gate / (1.0f + metal::precise::exp(-gate));
      out[size_t(row) * D + d] = static_cast<T>(v[i] * scale * static_cast<float>(weight[d]) * silu);
    }
  }
}
