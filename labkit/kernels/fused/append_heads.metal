// A simdgroup takes one query head of a new token, or one column of one KV head's tail: a new column is made from the token's
// key and value, an older one copied, a free one zeroed. A token's row: each head's query and gate, keys, values.
constexpr uint COLUMNS_FROM = HQ * L;  // of a row's tasks
constexpr int K_AT = 2 * HQ * D, V_AT = K_AT + HK * D;
threadgroup float rotary[THREADS / 32][ROTARY > 0 ? ROTARY : 1];
uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
uint task = threadgroup_position_in_grid.x * (THREADS / 32) + simdgroup;
uint b = threadgroup_position_in_grid.y;
auto rows = projected + size_t(b) * L * PITCH;

if (task < COLUMNS_FROM) {
  uint l = task / HQ, head = task % HQ;
  auto from = rows + size_t(l) * PITCH + head * (2 * D);
  float position = static_cast<float>(positions[b] + int(l));
  auto to = q + ((size_t(b) * L + l) * HQ + head) * D;
  rotate_head<T, D, ROTARY, VEC>(from, q_weight, inverse_frequency, position, eps, rotary[simdgroup], lane, to);
} else if (task < COLUMNS_FROM + HK * C) {
  uint head = (task - COLUMNS_FROM) / C, column = (task - COLUMNS_FROM) % C;
  int l = int(column) - write[WRITES * b];
  size_t at = ((size_t(b) * HK + head) * C + column) * D;
  if (l >= 0 && l < L) {
    auto from = rows + size_t(l) * PITCH + K_AT + head * D;
    float position = static_cast<float>(positions[b] + l);
    rotate_head<T, D, ROTARY, VEC>(from, k_weight, inverse_frequency, position, eps, rotary[simdgroup], lane, tail_keys_out + at);
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
