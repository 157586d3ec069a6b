// y[t, n] = sum over slots of products[t, slot, n] + shared_factor[t] shared[t, n]: four columns a thread, slots in order.
uint index = thread_position_in_grid.x;
constexpr uint FOURS = (N + 3) / 4;
uint token = index / FOURS, column = index % FOURS * 4;
if (token < uint(TOKENS)) {
  const device T* first = products + size_t(token) * TOPK * N + column;
  size_t place = size_t(token) * N + column;
  float factor = SHARED ? static_cast<float>(shared_factor[token]) : 0.0f;
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (N % 4 == 0) {
#pragma unroll
    for (int slot = 0; slot < TOPK; slot++) {
      vec<T, 4> four = *(const device vec<T, 4>*)(first + slot * N);
      sum[0] += static_cast<float>(four.x), sum[1] += static_cast<float>(four.y);
      sum[2] += static_cast<float>(four.z), sum[3] += static_cast<float>(four.w);
    }
    if (SHARED) {
      vec<T, 4> four = *(const device vec<T, 4>*)(shared + place);
      sum[0] += factor * static_cast<float>(four.x), sum[1] += factor * static_cast<float>(four.y);
      sum[2] += factor * static_cast<float>(four.z), sum[3] += factor * static_cast<float>(four.w);
    }
    vec<T, 4> out;
    out.x = static_cast<T>(sum[0]), out.y = static_cast<T>(sum[1]);
    out.z = static_cast<T>(sum[2]), out.w = static_cast<T>(sum[3]);
    *(device vec<T, 4>*)(y + place) = out;
  } else {
    for (uint i = 0; i < min(4u, uint(N) - column); i++) {
      for (int slot = 0; slot < TOPK; slot++) sum[i] += static_cast<float>(first[slot * N + i]);
      if (SHARED) sum[i] += factor * static_cast<float>(shared[place + i]);
      y[place + i] = static_cast<T>(sum[i]);
    }
  }
}
