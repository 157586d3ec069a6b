// products[a, n] = weights[a] (down . hidden)[n] for the sorted rows of one expert's block, written to the row of their assignment
// a = order[p], so that a token's products lie side by side.
threadgroup uint4 memory[Tile::MEMORY];
uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
uint block = threadgroup_position_in_grid.y;
uint expert = block_map[4 * block], start = block_map[4 * block + 1], rows = block_map[4 * block + 2];
if (rows == 0) return;

const device T* sources[Tile::COPIES];
for (int i = 0; i < Tile::COPIES; i++) {
  sources[i] = hidden + size_t(start + min(Tile::copied_row(simdgroup * 32 + lane, i), rows - 1)) * K;
}
TileWeights<S> tile_weights;
tile_weights.w[0] = down + size_t(expert) * N * (K * BITS / 32);
tile_weights.scales[0] = down_scales + size_t(expert) * N * (K / GROUP);
tile_weights.biases[0] = down_biases + size_t(expert) * N * (K / GROUP);
tile_weights.first = threadgroup_position_in_grid.x * Tile::OUTPUTS;
Tile tile;
tile.run(memory, sources, tile_weights, rows, lane, simdgroup);
#pragma unroll
for (int i = 0; i < Tile::ROWS; i++) {
  uint row = tile.row(i);
  if (row < rows) {
    uint assignment = order[start + row];
    float weight = static_cast<float>(weights[assignment]);
    device T* to = products + size_t(assignment) * N;
#pragma unroll
    for (int j = 0; j < Tile::RUNS; j++) {
      float values[Tile::RUN];
      tile.take(i, j, 0, values);
#pragma unroll
      for (int k = 0; k < Tile::RUN; k++) values[k] *= weight;
      store_run<N, Tile::RUN>(to, tile.column(j), values);
    }
  }
}
