// `residual_rms_norm` and `few_rows` in one: each threadgroup norms the rows again, from cache, while its weights are on their way, and
// multiplies them with 16 rows of the matrix.
alignas(16) threadgroup float memory[FewRows::MEMORY];
alignas(16) threadgroup T rows[M * K];
threadgroup float partial[M * 32];
uint thread_ = thread_position_in_threadgroup.x, lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
WeightRows<S> tile;
tile.w = w, tile.scales = scales, tile.biases = biases, tile.first = threadgroup_position_in_grid.x * 16;
prefetch_rows<BITS, GROUP, K, N>(tile, 0, thread_);
bool writes = threadgroup_position_in_grid.x == 0;
NormedRows<T, K, M, THREADS, SIMDS, ADDS, R> norm;
norm.sum(x, residual, weight, rows, partial, lane, simdgroup);
norm.scale(x, residual, eps, writes, hidden, rows, partial, lane, simdgroup);
few_rows_tile<FewRows, M, N, 1, SIMDS>(w, scales, biases, rows, tile.first, y, memory, thread_, lane, simdgroup);
