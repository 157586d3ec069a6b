// y[m, n] = sum_k x[m, k] W[n, k] for 1 to 8 rows of x: a threadgroup computes 16 * PARTS columns of y. `FewRows` is the form that
// the kernel's first line names.
threadgroup alignas(16) float memory[FewRows::MEMORY];
uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
uint first = threadgroup_position_in_grid.x * (16 * PARTS);

WeightRows<S> parts[PARTS];
for (int p = 0; p < PARTS; p++) {
  parts[p].w = w, parts[p].scales = scales, parts[p].biases = biases, parts[p].first = first + 16 * p;
}
FewRows::run(parts, x, 0, nullptr, nullptr, memory, lane, simdgroup);
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint i = thread_position_in_threadgroup.x; i < 16 * PARTS * M; i += 32 * SIMDS) {
  uint row = i % (16 * PARTS), m = i / (16 * PARTS);
  if (first + row < uint(N)) y[size_t(m) * N + first + row] = static_cast<T>(FewRows::at(memory, row / 16, row % 16, m));
}
