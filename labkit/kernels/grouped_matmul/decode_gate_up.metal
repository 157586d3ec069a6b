// hidden[a, n] = silu(gate . x) (up . x) for one assignment a (token a / TOPK, expert indices[a]) and a tile of columns: the
// expert's gate and up rows are read together, each once.
alignas(16) threadgroup float memory[FewRows::MEMORY];
threadgroup int expert[1];
threadgroup float factor[1];
uint assignment = threadgroup_position_in_grid.y, first = threadgroup_position_in_grid.x * FewRows::COLUMNS;
uint thread_ = thread_position_in_threadgroup.x;
if (thread_ == 0) expert[0] = indices[assignment], factor[0] = 1.0f;
threadgroup_barrier(mem_flags::mem_threadgroup);

WeightRows<S> parts[2];
parts[0].w = gate, parts[0].scales = gate_scales, parts[0].biases = gate_biases, parts[0].first = first;
parts[1].w = up, parts[1].scales = up_scales, parts[1].biases = up_biases, parts[1].first = first;
gate_up_tile<FewRows, N>(parts, x + size_t(assignment / TOPK) * K, expert, factor, hidden + size_t(assignment) * N, memory, thread_,
                         thread_index_in_simdgroup, simdgroup_index_in_threadgroup);
