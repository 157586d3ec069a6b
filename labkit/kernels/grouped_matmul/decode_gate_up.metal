// hidden[a, n] = silu(gate . x) (up . x) for one assignment a (token a / TOPK, expert indices[a]) and 16 columns: the expert's gate
// and up rows are read together, each once.
threadgroup alignas(16) float memory[FewRows::MEMORY];
threadgroup int expert[1];
threadgroup float factor[1];
uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
uint assignment = threadgroup_position_in_grid.y, first = threadgroup_position_in_grid.x * 16;
if (thread_position_in_threadgroup.x == 0) expert[0] = indices[assignment], factor[0] = 1.0f;
threadgroup_barrier(mem_flags::mem_threadgroup);

WeightRows<S> parts[2];
parts[0].w = gate, parts[0].scales = gate_scales, parts[0].biases = gate_biases, parts[0].first = first;
parts[1].w = up, parts[1].scales = up_scales, parts[1].biases = up_biases, parts[1].first = first;
FewRows::run(parts, x + size_t(assignment / TOPK) * K, 0, expert, factor, memory, lane, simdgroup);
threadgroup_barrier(mem_flags::mem_threadgroup);
uint row = thread_position_in_threadgroup.x;
if (row < 16 && first + row < uint(N)) {
  float h = swiglu(FewRows::at(memory, 0, row, 0), FewRows::at(memory, 1, row, 0));
  hidden[size_t(assignment) * N + first + row] = static_cast<T>(h);
}
