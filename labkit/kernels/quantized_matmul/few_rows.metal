// y[m, n] = sum_k x[m, k] W[n, k] for 1 to 8 rows of x: a threadgroup computes 16 * PARTS columns of y. `FewRows` is the form that
// the kernel's first line names.
alignas(16) threadgroup float memory[FewRows::MEMORY];
few_rows_tile<FewRows, M, N, PARTS, SIMDS>(w, scales, biases, x, threadgroup_position_in_grid.x * (16 * PARTS), y, memory,
                                           thread_position_in_threadgroup.x, thread_index_in_simdgroup,
                                           simdgroup_index_in_threadgroup);
