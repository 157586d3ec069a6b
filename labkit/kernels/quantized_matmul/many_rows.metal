// y[m, n] = sum_k x[m, k] W[n, k] for many rows: a threadgroup computes BM rows by Tile::OUTPUTS columns. `Tile` is the form that
// the kernel's first line names.
threadgroup uint4 memory[Tile::MEMORY];
uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
uint start = threadgroup_position_in_grid.y * BM, rows = min(uint(BM), uint(M) - start);

const device T* sources[Tile::COPIES];
for (int i = 0; i < Tile::COPIES; i++) {
  sources[i] = x + size_t(start + min(Tile::copied_row(simdgroup * 32 + lane, i), rows - 1)) * K;
}
TileWeights<S> weights;
weights.w[0] = w, weights.scales[0] = scales, weights.biases[0] = biases;
weights.first = threadgroup_position_in_grid.x * Tile::OUTPUTS;
Tile tile;
tile.run(memory, sources, weights, rows, lane, simdgroup);
#pragma unroll
for (int i = 0; i < Tile::ROWS; i++) {
  uint row = tile.row(i);
  if (row < rows) {
    auto to = y + size_t(start + row) * N;
#pragma unroll
    for (int j = 0; j < Tile::RUNS; j++) {
      float values[Tile::RUN];
      tile.take(i, j, 0, values);
      store_run<N, Tile::RUN>(to, tile.column(j), values);
    }
  }
}
