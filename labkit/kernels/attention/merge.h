//@provides merge_values
// The parts of one query head become WIDTH of its values, from `start` on: each part's share counts by its largest score and its sum.
// By WIDTH * SLICES threads, which share the parts; `shares` holds as many floats, `weights` SLICES. With gates the values are
// multiplied by the sigmoid of their own.
template <class T, int D, int WIDTH, int SLICES, bool GATED, class Stats, class Gates>
METAL_FUNC void merge_values(const device float* partial, Stats stats, Gates gates, uint parts, uint start,
                             device T* out, threadgroup float* shares, threadgroup float* weights, uint t) {
  uint slice = t / WIDTH, d = t % WIDTH;
  float highest = -INFINITY;
  for (uint p = 0; p < parts; p++) highest = max(highest, stats[2 * p]);
  float share = 0.0f, total = 0.0f;
  for (uint p = slice; p < parts; p += SLICES) {
    // A part without columns has no largest score; a row without any gives zeros.
    float weight = stats[2 * p] == -INFINITY ? 0.0f : exp2(stats[2 * p] - highest);
    share += weight * partial[p * D + start + d];
    total += weight * stats[2 * p + 1];
  }
  shares[t] = share;
  if (d == 0) weights[slice] = total;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (slice == 0) {
    for (uint s = 1; s < SLICES; s++) {
      share += shares[s * WIDTH + d];
      total += weights[s];
    }
    float y = total > 0.0f ? share / total : 0.0f;
    if (GATED) y /= 1.0f + metal::precise::exp(-static_cast<float>(gates[start + d]));
    out[start + d] = static_cast<T>(y);
  }
}
