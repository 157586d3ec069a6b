//@provides add_part
// A part's share counts by its largest score and its sum. One without columns has no largest score.
METAL_FUNC void add_part(float top, float sum, float4 values, float highest, thread float* share, thread float& total) {
  float weight = top == -INFINITY ? 0.0f : exp2(top - highest);
  for (uint e = 0; e < 4; e++) share[e] += weight * values[e];
  total += weight * sum;
}

//@provides merge_values
// The parts of one query head become WIDTH of its values, from `start` on. A lane takes four values of a part, WIDTH / 4 lanes a part,
// SIMDS simdgroups all parts, WIDTH at most 32 * SIMDS; `shares` holds WIDTH floats for each simdgroup, `weights` one. A row that sees nothing gives zeros. With
// gates the values are multiplied by the sigmoid of their own.
template <class T, int D, int WIDTH, int SIMDS, bool GATED, class Stats, class Gates>
METAL_FUNC void merge_values(const device float* partial, Stats stats, Gates gates, uint parts, uint start, device T* out,
                             threadgroup float* shares, threadgroup float* weights, uint lane, uint simd) {
  constexpr uint LANES = WIDTH / 4, STRIDE = SIMDS * (32 / LANES), ASKED = 4;
  uint first = simd * (32 / LANES) + lane / LANES, d = lane % LANES * 4;
  // The first parts are asked for before anything waits.
  float4 values[ASKED];
  float tops[ASKED], sums[ASKED];
#pragma unroll
  for (uint i = 0; i < ASKED; i++) {
    uint p = first + i * STRIDE;
    for (uint e = 0; e < 4; e++) values[i][e] = 0.0f;
    tops[i] = -INFINITY, sums[i] = 0.0f;
    if (p < parts) {
      values[i] = *(const device float4*)(partial + size_t(p) * D + start + d);
      tops[i] = stats[2 * p], sums[i] = stats[2 * p + 1];
    }
  }
  uint t = simd * 32 + lane;
  float gate = GATED && t < WIDTH ? static_cast<float>(gates[start + t]) : 0.0f;
  float highest = -INFINITY;
  for (uint p = lane; p < parts; p += 32) highest = max(highest, stats[2 * p]);
  highest = simd_max(highest);

  float share[4] = {0.0f, 0.0f, 0.0f, 0.0f}, total = 0.0f;
#pragma unroll
  for (uint i = 0; i < ASKED; i++) add_part(tops[i], sums[i], values[i], highest, share, total);
  for (uint p = first + ASKED * STRIDE; p < parts; p += STRIDE) {
    float4 value = *(const device float4*)(partial + size_t(p) * D + start + d);
    add_part(stats[2 * p], stats[2 * p + 1], value, highest, share, total);
  }
#pragma unroll
  for (uint step = LANES; step < 32; step *= 2) {
    for (uint e = 0; e < 4; e++) share[e] += simd_shuffle_xor(share[e], static_cast<ushort>(step));
    total += simd_shuffle_xor(total, static_cast<ushort>(step));
  }
  if (lane < LANES) {
    for (uint e = 0; e < 4; e++) shares[simd * WIDTH + d + e] = share[e];
  }
  if (lane == 0) weights[simd] = total;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < WIDTH) {
    float y = 0.0f, all = 0.0f;
    for (uint s = 0; s < SIMDS; s++) y += shares[s * WIDTH + t], all += weights[s];
    y = all > 0.0f ? y / all : 0.0f;
    if (GATED) y /= 1.0f + metal::precise::exp(-gate);
    out[start + t] = static_cast<T>(y);
  }
}
