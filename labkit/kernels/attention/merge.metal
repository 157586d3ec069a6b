// A threadgroup takes WIDTH values of one query head. Its gate stands behind its query in the projection's row.
threadgroup float shares[SIMDS * WIDTH];
threadgroup float weights[SIMDS];
size_t head = threadgroup_position_in_grid.y;
merge_values<T, D, WIDTH, SIMDS, GATED>(partial + head * PARTS * D, stats + head * PARTS * 2,
                                        gates + (GATED ? head / HEADS * GATE_PITCH + head % HEADS * (2 * D) + D : 0), uint(PARTS),
                                        threadgroup_position_in_grid.x * WIDTH, out + head * D, shares, weights,
                                        thread_index_in_simdgroup, simdgroup_index_in_threadgroup);
