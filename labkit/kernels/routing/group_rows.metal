// Each threadgroup sums all blocks' counts itself, which costs less than a launch between, then places its own block's
// assignments: first row of the expert + the expert's rows in earlier blocks + the rank within the block. A rank is counted,
// never drawn from a counter, so the order is the stable one whatever runs first.
constexpr uint LANES = (E + 31) / 32 * 32;  // threads that own an expert each; the rest of the threadgroup takes other slices
constexpr uint SLICES = THREADS / LANES;
threadgroup uint2 sums[16];
threadgroup uint2 partial[SLICES * LANES];
threadgroup uint first_row[E + 1];
threadgroup uint first_block[E + 1];
threadgroup uint start[E];
threadgroup ushort4 chosen[BLOCK / 4];
uint t = thread_position_in_threadgroup.x;
uint block = threadgroup_position_in_grid.x;
uint n = min(uint(BLOCK), uint(N) - block * BLOCK);

for (uint i = t; i < (n + 3) / 4 * 4; i += THREADS) {
  ((threadgroup ushort*)chosen)[i] = i < n ? ushort(indices[block * BLOCK + i]) : ushort(0xffff);
}
uint expert = t % LANES, slice = t / LANES;
if (slice < SLICES) {
  uint before = 0, all = 0;
  if (expert < uint(E)) {
    for (uint b = slice; b < uint(BLOCKS); b += SLICES) {
      uint count = uint(counts[b * E + expert]);
      all += count;
      before += b < block ? count : 0;
    }
  }
  partial[t].x = all;
  partial[t].y = before;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
uint rows = 0, earlier = 0;
if (t < uint(E)) {
  for (uint s = 0; s < SLICES; s++) {
    uint2 sum = partial[s * LANES + t];
    rows += sum.x;
    earlier += sum.y;
  }
}
scan_experts<E>(rows, uint(tile), t, thread_index_in_simdgroup, simdgroup_index_in_threadgroup, first_row, first_block, sums);
if (t < uint(E)) start[t] = first_row[t] + earlier;
threadgroup_barrier(mem_flags::mem_threadgroup);

for (uint i = t; i < n; i += THREADS) {
  uint position = start[((threadgroup ushort*)chosen)[i]] + rank_of(chosen, i);
  inverse[block * BLOCK + i] = int(position);
  order[position] = int(block * BLOCK + i);
}
if (block == 0) {
  for (uint e = t; e <= uint(E); e += THREADS) offsets[e] = int(first_row[e]);
}
for (uint j = block * THREADS + t; j < uint(MAX_BLOCKS); j += uint(BLOCKS) * THREADS) {
  ((device int4*)block_map)[j] = map_block<E>(j, uint(tile), first_row, first_block);
}
