// Norm, router, choice, experts and their sum: the second half of a layer in one launch.
using Half = SparseHalf<T, S, R, GateUp, Down, M, D, E, TOPK, SHARED, RENORMALISE, SCORES, ROUTER_BITS, ROUTER_GROUP, I, BITS, GROUP,
                        DOWN_BITS, DOWN_GROUP, SIMDS>;
alignas(16) threadgroup float memory[Half::MEMORY];
threadgroup float partial[32];
threadgroup int expert[Half::CHOICES];
threadgroup float factor[Half::CHOICES + 1];
Grid grid;
grid.open(words, threadgroups_per_grid.x, threadgroup_position_in_grid.x, thread_position_in_threadgroup.x,
          thread_index_in_simdgroup, simdgroup_index_in_threadgroup);
SparseWeights<T, S, R> weights;
weights.norm = norm;
weights.router = router, weights.router_scales = router_scales, weights.router_biases = router_biases;
weights.parts[0].w = gate, weights.parts[0].scales = gate_scales, weights.parts[0].biases = gate_biases;
weights.parts[1].w = up, weights.parts[1].scales = up_scales, weights.parts[1].biases = up_biases;
weights.down.w = down, weights.down.scales = down_scales, weights.down.biases = down_biases;
Half::send(grid, weights);
Half::run(grid, weights, update, stream, eps, (device T*)(words + HIDDEN_AT), (device T*)(words + NORMED_AT),
          (device float*)(words + LOGITS_AT), (device T*)(words + INNER_AT), (device T*)(words + Y_AT), memory, partial, expert, factor);
