// A head's query or key on its way to attention: RMSNorm, weight, rotation of the first values.

//@provides rotate_head
// One simdgroup takes the D values at `from` to `to`. They stay in registers from the load to the rotation; only the rotary part
// passes through threadgroup memory (2 * ROTARY floats of this simdgroup's own), where each value finds the other one of its pair, and
// the cosine and sine of their angle. Whatever is read is asked for before anything waits; angles are computed meanwhile.
template <class T, int D, int ROTARY, int VEC, class Row, class Weight, class Frequency>
METAL_FUNC void rotate_head(
    Row from, Weight weight, Frequency inverse_frequency, float position, float eps, threadgroup float* rotary, uint lane,
    device T* to) {
  constexpr int PARTS = (D + 32 * VEC - 1) / (32 * VEC);
  constexpr uint HALF = ROTARY / 2;
  threadgroup float* cosines = rotary + ROTARY;
  threadgroup float* sines = cosines + HALF;
  float v[PARTS * VEC], w[PARTS * VEC];
  for (int i = 0; i < PARTS; i++) {
    uint d = (lane + 32 * i) * VEC;
    for (int j = 0; j < VEC; j++) v[i * VEC + j] = w[i * VEC + j] = 0.0f;
    if (d < D) {
      Values<VEC, T>::load(from + d, v + i * VEC);
      for (int j = 0; j < VEC; j++) w[i * VEC + j] = static_cast<float>(weight[d + j]);
    }
  }
  for (uint d = lane; d < HALF; d += 32) {
    float angle = position * inverse_frequency[d];
    cosines[d] = metal::precise::cos(angle);
    sines[d] = metal::precise::sin(angle);
  }
  float sum = 0.0f;
  for (int i = 0; i < PARTS * VEC; i++) sum += v[i] * v[i];
  float scale = metal::precise::rsqrt(simd_sum(sum) / D + eps);
  for (int i = 0; i < PARTS; i++) {
    for (uint j = 0; j < VEC; j++) {
      uint d = (lane + 32 * i) * VEC + j;
      v[i * VEC + j] *= scale * w[i * VEC + j];
      if (d < ROTARY) rotary[d] = v[i * VEC + j];
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = 0; i < PARTS; i++) {
    uint first = (lane + 32 * i) * VEC;
    for (uint j = 0; j < VEC; j++) {
      uint d = first + j;
      if (d < ROTARY) {
        bool low = d < HALF;
        float c = cosines[low ? d : d - HALF], s = sines[low ? d : d - HALF];
        float y = v[i * VEC + j], other = rotary[low ? d + HALF : d - HALF];
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
      bool fresh = l >= 0 && l < L;
      size_t at = ((size_t(b) * HK + head) * C + column) * D;
      auto token = rows + size_t(fresh ? l : 0) * PITCH;
      constexpr int PARTS = (D + 32 * VEC - 1) / (32 * VEC);
      float key[PARTS * VEC], value[PARTS * VEC];
      for (int i = 0; i < PARTS; i++) {
        uint d = (lane + 32 * i) * VEC;
        for (int j = 0; j < VEC; j++) key[i * VEC + j] = value[i * VEC + j] = 0.0f;
        if (l < 0 && d < D) {
          Values<VEC, T>::load(tail_keys + at + d, key + i * VEC);
          Values<VEC, T>::load(tail_values + at + d, value + i * VEC);
        } else if (fresh && d < D) {
          Values<VEC, T>::load(token + V_AT + head * D + d, value + i * VEC);
        }
      }
      if (fresh) {
        float position = static_cast<float>(positions[b] + l);
        rotate_head<T, D, ROTARY, VEC>(token + K_AT + head * D, k_weight, inverse_frequency, position, eps, rotary, lane,
                                       tail_keys_out + at);
      }
      for (int i = 0; i < PARTS; i++) {
        uint d = (lane + 32 * i) * VEC;
        if (d < D) {
          if (!fresh) Values<VEC, T>::store(tail_keys_out + at + d, key + i * VEC);
          Values<VEC, T>::store(tail_values_out + at + d, value + i * VEC);
        }
      }
    }
  }
};
