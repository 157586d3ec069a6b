// silu(gate) * up, VEC values a thread.
uint at = thread_position_in_grid.x * VEC;
if (at < uint(count)) {
  float g[VEC], y[VEC];
  Values<VEC, T>::load(gate + at, g);
  Values<VEC, T>::load(up + at, y);
  for (int j = 0; j < VEC; j++) y[j] *= g[j] / (1.0f + metal::precise::exp(-g[j]));
  Values<VEC, T>::store(out + at, y);
}
