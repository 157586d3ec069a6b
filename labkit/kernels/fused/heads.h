// A head's query or key on its way to attention: RMSNorm, weight, rotation of the first values.

//@provides rotate_head
// One simdgroup takes the D values at `from` to `to`. They stay in registers from the load to the rotation; only the rotary part
// passes through threadgroup memory (ROTARY floats of this simdgroup's own), where each value finds the other one of its pair.
template <class T, int D, int ROTARY, int VEC, class Row, class Weight, class Frequency>
METAL_FUNC void rotate_head(
    Row from, Weight weight, Frequency inverse_frequency, float position, float eps, threadgroup float* rotary, uint lane,
    device T* to) {
  constexpr int PARTS = (D + 32 * VEC - 1) / (32 * VEC);
  constexpr uint HALF = ROTARY / 2;
  float v[PARTS * VEC];
  float sum = 0.0f;
  for (int i = 0; i < PARTS; i++) {
    uint d = (lane + 32 * i) * VEC;
    for (int j = 0; j < VEC; j++) v[i * VEC + j] = 0.0f;
    if (d < D) Values<VEC, T>::load(from + d, v + i * VEC);
    for (int j = 0; j < VEC; j++) sum += v[i * VEC + j] * v[i * VEC + j];
  }
  float scale = metal::precise::rsqrt(simd_sum(sum) / D + eps);
  for (int i = 0; i < PARTS; i++) {
    for (uint j = 0; j < VEC; j++) {
      uint d = (lane + 32 * i) * VEC + j;
      if (d < D) {
        v[i * VEC + j] *= scale * static_cast<float>(weight[d]);
        if (d < ROTARY) rotary[d] = v[i * VEC + j];
      }
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = 0; i < PARTS; i++) {
    uint first = (lane + 32 * i) * VEC;
    for (uint j = 0; j < VEC; j++) {
      uint d = first + j;
      if (d < ROTARY) {
        bool low = d < HALF;
        float angle = position * inverse_frequency[low ? d : d - HALF];
        float y = v[i * VEC + j], other = rotary[low ? d + HALF : d - HALF];
        float c = metal::precise::cos(angle), s = metal::precise::sin(angle);
        v[i * VEC + j] = low ? y * c - other * s : other * s + y * c;
      }
    }
    if (first < D) Values<VEC, T>::store(to + first, v + i * VEC);
  }
}
