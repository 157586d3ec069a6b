// A Gated DeltaNet layer in one launch: norm and projections; convolution, recurrence and gated norm by heads; output projection; the
// sparse half. Five grid-wide barriers.
using Half = SparseHalf<T, S, R, GateUp, Down, M, D, E, TOPK, SHARED, RENORMALISE, SCORES, ROUTER_BITS, ROUTER_GROUP, I, BITS, GROUP,
                        DOWN_BITS, DOWN_GROUP, SIMDS>;
using Step = DeltaStep<T, HK, HV, DK, DV, LANES, COLS, SIMDS, 1, false, false, IN_N, IN_N, A_AT, B_AT, IN_N, Z_AT>;
constexpr int WIDTH = HV * DV;
alignas(16) threadgroup float memory[larger(larger(Inputs::MEMORY, Output::MEMORY), larger(Step::MEMORY, Half::MEMORY))];
threadgroup float partial[64];
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
WeightRows<S> in_tile, out_tile;
in_tile.w = in_w, in_tile.scales = in_scales, in_tile.biases = in_biases, in_tile.first = grid.group * 16;
out_tile.w = out_w, out_tile.scales = out_scales, out_tile.biases = out_biases, out_tile.first = grid.group * 16;

prefetch_rows<IN_BITS, IN_GROUP, D, IN_N>(in_tile, 0, grid.thread_);
device T* sums = (device T*)(words + SUMS_AT);
device T* mine = (device T*)(words + COPIES_AT) + grid.group * (M * D);
device T* projected = (device T*)(words + PROJECTED_AT);
device T* mixed = (device T*)(words + MIXED_AT);
device T* added = (device T*)(words + ADDED_AT);
norm_rows<T, D, M, 32 * SIMDS>(update, stream, input_norm, eps, grid.group == 0, sums, mine, partial, grid.thread_, grid.lane,
                               grid.simdgroup);
project_rows<Inputs, M, IN_BITS, IN_GROUP, D, IN_N, SIMDS>(grid, in_tile, mine, projected, memory);
if (grid.group < M * HV && grid.thread_ % 32 == 0) {
  prefetch(state + (grid.group * SIMDS + grid.simdgroup) * (DV * DK / SIMDS), DV * DK / SIMDS * 4);
}
prefetch_rows<OUT_BITS, OUT_GROUP, WIDTH, D>(out_tile, 0, grid.thread_);
grid.sync();

for (uint head = grid.group; head < M * HV; head += grid.groups) {
  Step::run(projected, projected, projected, projected, tail, state, conv, a_log, dt_bias, head_norm, a_log, eps, mixed,
            (device float*)(words + STATE_AT), (device T*)(words + TAIL_AT), int(head / HV), int(head % HV), memory, int(grid.lane),
            int(grid.simdgroup));
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
Half::send(grid, weights);
grid.sync();

project_rows<Output, M, OUT_BITS, OUT_GROUP, WIDTH, D, SIMDS>(grid, out_tile, mixed, added, memory);
grid.sync();

Half::run(grid, weights, added, sums, eps, (device T*)(words + HIDDEN_AT), (device T*)(words + NORMED_AT),
          (device float*)(words + LOGITS_AT), (device T*)(words + INNER_AT), (device T*)(words + Y_AT), memory, partial, expert, factor);
