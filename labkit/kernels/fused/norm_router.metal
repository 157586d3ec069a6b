// Each threadgroup normalises the row again, from cache, and multiplies it with the router's rows of THREADS / 32 experts, one
// a simdgroup.
threadgroup float partial[32];
alignas(16) threadgroup float row_[RouterRow<D, BITS, GROUP>::MEMORY];
size_t line = threadgroup_position_in_grid.y, begin = line * D;
uint block = threadgroup_position_in_grid.x;
norm_and_score<T, D, BITS, GROUP, THREADS>(
    x + begin, residual + begin, weight, router, scales, biases, eps, block * (THREADS / 32), uint(E), block == 0, hidden + begin,
    normed + begin, logits + line * E, row_, partial, thread_position_in_threadgroup.x, thread_index_in_simdgroup,
    simdgroup_index_in_threadgroup);
