// The parts of one query head become its output: each part's share counts by its largest score and its sum. With gates the
// output is multiplied by the sigmoid of its own, which stands behind its query in the projection's row.
constexpr uint THREADS = D * SLICES;
threadgroup float shares[D * SLICES];
threadgroup float weights[SLICES];

uint t = thread_index_in_threadgroup;
uint slice = t / D, d = t % D;
size_t head = threadgroup_position_in_grid.x;
auto mine = stats + head * PARTS * 2;

float highest = -INFINITY;
for (uint p = 0; p < uint(PARTS); p++) highest = max(highest, mine[2 * p]);
float share = 0.0f, total = 0.0f;
for (uint p = slice; p < uint(PARTS); p += SLICES) {
  // A part without columns has no largest score; a row without any gives zeros.
  float weight = mine[2 * p] == -INFINITY ? 0.0f : exp2(mine[2 * p] - highest);
  share += weight * partial[(head * PARTS + p) * D + d];
  total += weight * mine[2 * p + 1];
}
shares[t] = share;
if (d == 0) weights[slice] = total;
threadgroup_barrier(mem_flags::mem_threadgroup);
if (slice == 0) {
  for (uint s = 1; s < SLICES; s++) {
    share += shares[s * D + d];
    total += weights[s];
  }
  float y = total > 0.0f ? share / total : 0.0f;
  if (GATED) {
    float gate = static_cast<float>(gates[head / HEADS * GATE_PITCH + head % HEADS * (2 * D) + D + d]);
    y /= 1.0f + metal::precise::exp(-gate);
  }
  out[head * D + d] = static_cast<T>(y);
}
