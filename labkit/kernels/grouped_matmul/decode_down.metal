// y[t, n] = sum over slots of weights[t, slot] (down of expert indices[t, slot]) . hidden[t, slot] + shared_factor[t] shared[t, n],
// for one token and 16 columns: nothing is written between the experts and their sum.
alignas(16) threadgroup float memory[FewRows::MEMORY];
threadgroup int expert[TOPK];
threadgroup float factor[TOPK];
uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
uint token = threadgroup_position_in_grid.y, first = threadgroup_position_in_grid.x * 16;
for (uint slot = thread_position_in_threadgroup.x; slot < uint(TOPK); slot += 32 * SIMDS) {
  expert[slot] = indices[token * TOPK + slot];
  factor[slot] = static_cast<float>(weights[token * TOPK + slot]);
}
threadgroup_barrier(mem_flags::mem_threadgroup);

WeightRows<S> parts[1];
parts[0].w = down, parts[0].scales = down_scales, parts[0].biases = down_biases, parts[0].first = first;
FewRows::run(parts, hidden + size_t(token) * TOPK * K, K, expert, factor, memory, lane, simdgroup);
threadgroup_barrier(mem_flags::mem_threadgroup);
uint row = thread_position_in_threadgroup.x;
if (row < 16 && first + row < uint(N)) {
  float sum = FewRows::at(memory, 0, row, 0);
  size_t place = size_t(token) * N + first + row;
  if (SHARED) sum += static_cast<float>(shared_factor[token]) * static_cast<float>(shared[place]);
  y[place] = static_cast<T>(sum);
}
