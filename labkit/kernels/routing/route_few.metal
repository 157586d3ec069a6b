// The whole routing of a few tokens in one threadgroup: a simdgroup chooses for one token at a time, then everybody groups.
threadgroup uint2 sums[16];
threadgroup uint first_row[E + 1];
threadgroup uint first_block[E + 1];
threadgroup ushort4 chosen[(TOKENS * K + 3) / 4];
uint t = thread_position_in_threadgroup.x;
uint lane = thread_index_in_simdgroup;

for (uint i = simdgroup_index_in_threadgroup; i < uint(T); i += THREADS / 32) {
  Choice choice = choose<E, K, SIGMOID, BIASED, RENORMALISE>(logits + i * L, bias, scale, lane);
  if (lane < uint(K)) {
    indices[i * K + lane] = int(choice.expert);
    weights[i * K + lane] = choice.weight;
    ((threadgroup ushort*)chosen)[i * K + lane] = ushort(choice.expert);
  }
}
uint n = uint(T) * K;
if (t < 3 && n + t < (n + 3) / 4 * 4) ((threadgroup ushort*)chosen)[n + t] = 0xffff;
threadgroup_barrier(mem_flags::mem_threadgroup);

uint rows = t < uint(E) ? count_of(chosen, n, t) : 0;
scan_experts<E>(rows, uint(tile), t, lane, simdgroup_index_in_threadgroup, first_row, first_block, sums);
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint i = t; i < n; i += THREADS) {
  uint position = first_row[((threadgroup ushort*)chosen)[i]] + rank_of(chosen, i);
  inverse[i] = int(position);
  order[position] = int(i);
}
for (uint e = t; e <= uint(E); e += THREADS) offsets[e] = int(first_row[e]);
for (uint j = t; j < uint(MAX_BLOCKS); j += THREADS) {
  ((device int4*)block_map)[j] = map_block<E>(j, uint(tile), first_row, first_block);
}
