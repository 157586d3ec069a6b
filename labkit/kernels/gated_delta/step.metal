// A threadgroup takes one head of one row.
using Step = DeltaStep<T, HK, HV, DK, DV, LANES, COLS, SIMDGROUPS, TOKENS, EACH, SPANNED, PITCH, GATE_PITCH, A_AT, B_AT, Z_PITCH, Z_AT>;
alignas(16) threadgroup float memory[Step::MEMORY];
Step::run(qkv, a, b_gate, z, tail, state, weight, a_log, dt_bias, norm_weight, spans, eps, out, states, tail_out,
          int(threadgroup_position_in_grid.y), int(threadgroup_position_in_grid.x), memory, int(thread_index_in_simdgroup),
          int(simdgroup_index_in_threadgroup));
