// A gated attention layer in one launch: norm and projections; norms and rotation of heads, with the tail's new column; parts of the
// cached columns; their merge and the output gate; output projection; the sparse half. Seven grid-wide barriers.
using Half = SparseHalf<T, S, R, GateUp, Down, M, D, E, TOPK, SHARED, RENORMALISE, SCORES, ROUTER_BITS, ROUTER_GROUP, I, BITS, GROUP,
                        DOWN_BITS, DOWN_GROUP, SIMDS>;
using Append = AppendHeads<T, HD, HQ, HKV, 1, TAIL, ROTARY, IN_N, 4>;
constexpr int WIDTH = HQ * HD;
constexpr uint PACKS = HKV * Attend::PACKS, CHUNKS = HD / 32;
alignas(16) threadgroup float memory[larger(larger(larger(Inputs::MEMORY, Output::MEMORY), larger(Attend::MEMORY, Half::MEMORY)),
                                            SIMDS * larger(2 * ROTARY, 64))];
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
device T* queries = (device T*)(words + QUERIES_AT);
device T* keys_after = (device T*)(words + TAIL_KEYS_AT);
device T* values_after = (device T*)(words + TAIL_VALUES_AT);
device float* shares = (device float*)(words + SHARES_AT);
device float* stats = (device float*)(words + STATS_AT);
device T* mixed = (device T*)(words + MIXED_AT);
device T* added = (device T*)(words + ADDED_AT);
norm_rows<T, D, M, 32 * SIMDS>(update, stream, input_norm, eps, grid.group == 0, sums, mine, partial, grid.thread_, grid.lane,
                               grid.simdgroup);
project_rows<Inputs, M, IN_BITS, IN_GROUP, D, IN_N, SIMDS>(grid, in_tile, mine, projected, memory);
// The part of the first columns that this threadgroup will read, of one KV head.
for (uint task = grid.group; task < M * PACKS * uint(PARTS); task += grid.groups) {
  uint m = task / (PACKS * PARTS), pack = task / PARTS % PACKS;
  Columns columns = part_of_columns(first[m], min(last[m], settled[0]), int(task % PARTS), PARTS, 0);
  size_t from = ((size_t(m) * HKV + pack / Attend::PACKS) * uint(COLUMNS) + uint(columns.begin)) * HD;
  // No more than the cache has room for beside everything else, whatever the context.
  uint bytes = uint(clamp(columns.end - columns.begin, 0, 64)) * HD * uint(sizeof(T));
  if (grid.thread_ == 0) prefetch(keys + from, bytes);
  if (grid.thread_ == 32) prefetch(values + from, bytes);
}
grid.sync();

for (uint task = grid.group * SIMDS + grid.simdgroup; task < M * Append::TASKS; task += grid.groups * SIMDS) {
  uint m = task / Append::TASKS;
  Append::run(m, task % Append::TASKS, projected, q_norm, k_norm, inverse_frequency, positions, tail_keys, tail_values, write[0], eps,
              queries, keys_after, values_after, memory + grid.simdgroup * (2 * ROTARY), grid.lane);
  simdgroup_barrier(mem_flags::mem_threadgroup);
}
prefetch_rows<OUT_BITS, OUT_GROUP, WIDTH, D>(out_tile, 0, grid.thread_);
grid.sync();

for (uint task = grid.group; task < M * PACKS * uint(PARTS); task += grid.groups) {
  Attend::run(queries, keys, values, keys_after, values_after, first, last, settled, write, scale, 1, COLUMNS, TAIL, HKV, PARTS, 0,
              task % PARTS, task / PARTS % PACKS, task / (PACKS * PARTS), shares, stats, memory, grid.lane, grid.simdgroup);
  reuse_part();
}
Half::send(grid, weights);
grid.sync();

for (uint task = grid.group; task < M * HQ * CHUNKS; task += grid.groups) {
  uint head = task / CHUNKS, m = head / HQ;
  merge_values<T, HD, 32, SIMDS, true>(shares + size_t(head) * PARTS * HD, stats + head * PARTS * 2,
                                       projected + m * IN_N + head % HQ * (2 * HD) + HD, PARTS, task % CHUNKS * 32, mixed + head * HD,
                                       memory, partial, grid.lane, grid.simdgroup);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
grid.sync();

project_rows<Output, M, OUT_BITS, OUT_GROUP, WIDTH, D, SIMDS>(grid, out_tile, mixed, added, memory);
grid.sync();

Half::run(grid, weights, added, sums, eps, (device T*)(words + HIDDEN_AT), (device T*)(words + NORMED_AT),
          (device float*)(words + LOGITS_AT), (device T*)(words + INNER_AT), (device T*)(words + Y_AT), memory, partial, expert, factor);
