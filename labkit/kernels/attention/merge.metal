// A threadgroup takes one query head. Its gate stands behind its query in the projection's row.
threadgroup float shares[D * SLICES];
threadgroup float weights[SLICES];
size_t head = threadgroup_position_in_grid.x;
merge_values<T, D, D, SLICES, GATED>(partial + head * PARTS * D, stats + head * PARTS * 2,
                                     gates + (GATED ? head / HEADS * GATE_PITCH + head % HEADS * (2 * D) + D : 0), uint(PARTS), 0,
                                     out + head * D, shares, weights, thread_index_in_threadgroup);
