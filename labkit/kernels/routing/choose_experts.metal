// A threadgroup takes a block of TOKENS tokens, a simdgroup one token at a time; then thread e counts the block's rows of
// expert e by walking the block's choices, so that no two threads ever add to one counter.
constexpr int SLOTS = K + SHARED, GROUPS = E + SHARED;
threadgroup ushort4 chosen[(TOKENS * SLOTS + 3) / 4];
uint lane = thread_index_in_simdgroup;
uint block = threadgroup_position_in_grid.x;
uint tokens = min(uint(TOKENS), uint(T) - block * TOKENS);

for (uint i = simdgroup_index_in_threadgroup; i < tokens; i += THREADS / 32) {
  size_t token = size_t(block) * TOKENS + i;
  Choice choice = choose_slot<E, K, SHARED, SIGMOID, BIASED, RENORMALISE>(logits + token * L, bias, scale, lane);
  if (lane < uint(SLOTS)) {
    indices[token * SLOTS + lane] = int(choice.expert);
    weights[token * SLOTS + lane] = choice.weight;
    ((threadgroup ushort*)chosen)[i * SLOTS + lane] = ushort(choice.expert);
  }
}
uint n = tokens * SLOTS;
uint t = thread_position_in_threadgroup.x;
if (t < 3 && n + t < (n + 3) / 4 * 4) ((threadgroup ushort*)chosen)[n + t] = 0xffff;
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint e = t; e < uint(GROUPS); e += THREADS) counts[block * GROUPS + e] = int(count_of(chosen, n, e));
