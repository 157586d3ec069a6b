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

//@provides AppendHeads
// A simdgroup's part of appending new tokens: task number `task` of row `b` is one query head of a token, or one column of one KV
// head's tail. A new column is made from the token's key and value, an older one copied, a free one zeroed. A token's row: each
// head's query and gate, keys, values. `rotary` is this simdgroup's own.
template <class T, int D, int HQ, int HK, int L, int C, int ROTARY, int PITCH, int VEC> struct AppendHeads {
  static constexpr constant uint COLUMNS_FROM = HQ * L, TASKS = COLUMNS_FROM + HK * C;
  static constexpr constant int K_AT = 2 * HQ * D, V_AT = K_AT + HK * D;

  template <class Weight, class Frequency, class Positions>
  static METAL_FUNC void run(uint b, uint task, const device T* projected, Weight q_weight, Weight k_weight, Frequency inverse_frequency,
                             Positions positions, const device T* tail_keys, const device T* tail_values, int write, float eps,
                             device T* q, device T* tail_keys_out, device T* tail_values_out, threadgroup float* rotary, uint lane) {
    auto rows = projected + size_t(b) * L * PITCH;
    if (task < COLUMNS_FROM) {
      uint l = task / HQ, head = task % HQ;
      float position = static_cast<float>(positions[b] + int(l));
      auto to = q + ((size_t(b) * L + l) * HQ + head) * D;
      rotate_head<T, D, ROTARY, VEC>(rows + size_t(l) * PITCH + head * (2 * D), q_weight, inverse_frequency, position, eps, rotary, lane,
                                     to);
    } else if (task < TASKS) {
      uint head = (task - COLUMNS_FROM) / C, column = (task - COLUMNS_FROM) % C;
      int l = int(column) - write;
      size_t at = ((size_t(b) * HK + head) * C + column) * D;
      if (l >= 0 && l < L) {
        auto from = rows + size_t(l) * PITCH + K_AT + head * D;
        float position = static_cast<float>(positions[b] + l);
        rotate_head<T, D, ROTARY, VEC>(from, k_weight, inverse_frequency, position, eps, rotary, lane, tail_keys_out + at);
      }
      for (uint d = lane * VEC; d < D; d += 32 * VEC) {
        float key[VEC], value[VEC];
        for (int j = 0; j < VEC; j++) key[j] = value[j] = 0.0f;
        if (l < 0) {
          Values<VEC, T>::load(tail_keys + at + d, key);
          Values<VEC, T>::load(tail_values + at + d, value);
        } else if (l < L) {
          Values<VEC, T>::load(rows + size_t(l) * PITCH + V_AT + head * D + d, value);
        }
        if (l < 0 || l >= L) Values<VEC, T>::store(tail_keys_out + at + d, key);
        Values<VEC, T>::store(tail_values_out + at + d, value);
      }
    }
  }
};
