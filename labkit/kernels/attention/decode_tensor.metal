// A threadgroup takes one part of one row's columns, and one pack of its query heads.
using Attend = AttendByTensor<T, D, GROUP, SIMDS, TAILED, PAGE>;
alignas(16) threadgroup float memory[Attend::MEMORY];
Attend::run(queries, keys, values, tail_keys, tail_values, first, last, settled, table, scale, L, S, TAIL, HKV, PARTS, BLOCK,
            threadgroup_position_in_grid.x, threadgroup_position_in_grid.y, threadgroup_position_in_grid.z, partial, stats, memory,
            thread_index_in_simdgroup, simdgroup_index_in_threadgroup);
