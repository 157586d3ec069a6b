// `norm_project` for one row, by the tensor core: a threadgroup computes TILES times 16 columns, and each of its simdgroups one task of
// `Row` in one or two of these tiles. Their weights are requested at once, behind what the norm is made of, which would wait for them
// else, and travel while it is scaled.
constexpr uint TURNS = 2, COLUMNS = (TILES + 1) / 2, SIMDS = COLUMNS * Row::TASKS;
alignas(16) threadgroup float memory[TILES * Row::MEMORY];
alignas(16) threadgroup T rows[K];
threadgroup float partial[32];
uint thread_ = thread_position_in_threadgroup.x, lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
uint first = threadgroup_position_in_grid.x * (16 * TILES), column = simdgroup / Row::TASKS, task = simdgroup % Row::TASKS;
uint begin = task * (64 * UNROLL);
bool writes = threadgroup_position_in_grid.x == 0;

NormedRows<T, K, 1, THREADS, SIMDS, ADDS, R> norm;
norm.sum(x, residual, weight, rows, partial, lane, simdgroup);
Row products[TURNS];
#pragma unroll
for (uint turn = 0; turn < TURNS; turn++) {
  uint tile = column + turn * COLUMNS;
  WeightRows<S> part;
  part.w = w, part.scales = scales, part.biases = biases, part.first = first + 16 * tile;
  if (tile < TILES) products[turn].request_weights(&part, 0, begin, lane);
}
norm.scale(x, residual, eps, writes, hidden, rows, partial, lane, simdgroup);
#pragma unroll
for (uint turn = 0; turn < TURNS; turn++) {
  uint tile = column + turn * COLUMNS;
  if (tile < TILES) {
    float total[2] = {0.0f, 0.0f};
    products[turn].request_x(rows, begin, lane);
    products[turn].multiply(total, 1.0f, lane);
    Row::store(total, memory + tile * Row::MEMORY, lane, task);
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint i = thread_; i < 16 * TILES; i += 32 * SIMDS) {
  if (first + i < uint(N)) y[first + i] = static_cast<T>(Row::at(memory + i / 16 * Row::MEMORY, 0, i % 16, 0));
}
