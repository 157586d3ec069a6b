// hidden[p, n] = silu(gate . x) (up . x) for the sorted rows p of one expert's block: BM rows by Tile::OUTPUTS columns. Row p of
// the sorted order is assignment order[p], of token order[p] / TOPK. Unused entries of the block map have no rows.
threadgroup uint4 memory[Tile::MEMORY];
uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
uint block = threadgroup_position_in_grid.y;
uint expert = block_map[4 * block], start = block_map[4 * block + 1], rows = block_map[4 * block + 2];
if (rows == 0) return;

const device T* sources[Tile::COPIES];
for (int i = 0; i < Tile::COPIES; i++) {
  uint p = start + min(Tile::copied_row(simdgroup * 32 + lane, i), rows - 1);
  sources[i] = x + size_t(order[p] / TOPK) * K;
}
TileWeights<S> weights;
weights.w[0] = gate + size_t(expert) * N * (K * BITS / 32), weights.w[1] = up + size_t(expert) * N * (K * BITS / 32);
weights.scales[0] = gate_scales + size_t(expert) * N * (K / GROUP), weights.scales[1] = up_scales + size_t(expert) * N * (K / GROUP);
weights.biases[0] = gate_biases + size_t(expert) * N * (K / GROUP), weights.biases[1] = up_biases + size_t(expert) * N * (K / GROUP);
weights.first = threadgroup_position_in_grid.x * Tile::OUTPUTS;
Tile tile;
tile.run(memory, sources, weights, rows, lane, simdgroup);
#pragma unroll
for (int i = 0; i < Tile::ROWS; i++) {
  uint row = tile.row(i);
  if (row < rows) {
    device T* to = hidden + size_t(start + row) * N;
#pragma unroll
    for (int j = 0; j < Tile::RUNS; j++) {
      float g[Tile::RUN], u[Tile::RUN];
      tile.take(i, j, 0, g);
      tile.take(i, j, 1, u);
#pragma unroll
      for (int k = 0; k < Tile::RUN; k++) g[k] = swiglu(g[k], u[k]);
      store_run<N, Tile::RUN>(to, tile.column(j), g);
    }
  }
}
