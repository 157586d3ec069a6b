// One threadgroup a row. Each thread keeps its best of every THREADS-th value; ties go to the smaller index.
threadgroup float values[32];
threadgroup uint places[32];
uint t = thread_position_in_threadgroup.x;
uint row = threadgroup_position_in_grid.x;
auto scores = logits + size_t(row) * V;

float best = -INFINITY;
uint place = 0xFFFFFFFFu;
for (uint i = t; i < uint(V); i += THREADS) {
  float value = static_cast<float>(scores[i]);
  if (value > best || (value == best && i < place)) {
    best = value;
    place = i;
  }
}
float top = threadgroup_max<THREADS>(best, values, thread_index_in_simdgroup, simdgroup_index_in_threadgroup);
uint winner = threadgroup_min_uint<THREADS>(
    best == top ? place : 0xFFFFFFFFu, places, thread_index_in_simdgroup, simdgroup_index_in_threadgroup);
if (t == 0) {
  // Only a row without any number has no winner.
  token[row] = winner == 0xFFFFFFFFu ? 0u : winner;
}
