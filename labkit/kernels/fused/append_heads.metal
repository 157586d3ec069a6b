// A simdgroup takes one query head of a new token, or one column of one KV head's tail.
threadgroup float rotary[THREADS / 32][ROTARY > 0 ? 2 * ROTARY : 1];
uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup, b = threadgroup_position_in_grid.y;
AppendHeads<T, D, HQ, HK, L, C, ROTARY, PITCH, VEC>::run(
    b, threadgroup_position_in_grid.x * (THREADS / 32) + simdgroup, projected, q_weight, k_weight, inverse_frequency, positions,
    tail_keys, tail_values, write[WRITES * b], eps, q, tail_keys_out, tail_values_out, rotary[simdgroup], lane);
