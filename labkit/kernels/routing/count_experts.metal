// How many assignments of each block of BLOCK chose each expert: thread e walks the block for expert e.
threadgroup ushort4 chosen[BLOCK / 4];
uint block = threadgroup_position_in_grid.x;
uint n = min(uint(BLOCK), uint(N) - block * BLOCK);
uint t = thread_position_in_threadgroup.x;
for (uint i = t; i < (n + 3) / 4 * 4; i += THREADS) {
  ((threadgroup ushort*)chosen)[i] = i < n ? ushort(indices[block * BLOCK + i]) : ushort(0xffff);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint e = t; e < uint(E); e += THREADS) counts[block * E + e] = int(count_of(chosen, n, e));
