// A threadgroup takes a chunk of 4 * THREADS tokens of one row: its largest logit, the sum of exp(logit - that), and the best
// perturbed token. What decides a draw from the whole vocabulary, and what lets the next kernel skip almost every chunk.
threadgroup float maxima[32];
threadgroup float sums[32];
threadgroup float tops[32];
threadgroup uint places[32];
uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
uint row = threadgroup_position_in_grid.y, chunk = threadgroup_position_in_grid.x;
uint strip = chunk * (THREADS / 32) + simdgroup;

Strip x = load_strip<MASKED>(logits + size_t(row) * V, mask + size_t(row) * W, strip, lane, uint(V));
Strip score = perturb(x, temperature[row], strip, lane, uint(steps[row]), seeds[row]);
float largest = -INFINITY, best = -INFINITY;
uint place = 0xffffffffu;
for (uint j = 0; j < 4; j++) {
  largest = max(largest, x.x[j]);
  if (score.x[j] > best) {
    best = score.x[j];
    place = 128 * strip + 32 * j + lane;
  }
}
largest = threadgroup_max<THREADS>(largest, maxima, lane, simdgroup);
float sum = 0.0f;
for (uint j = 0; j < 4; j++) sum += metal::precise::exp(x.x[j] - max(largest, -3.402823466e38f));
sum = threadgroup_sum<THREADS>(sum, sums, lane, simdgroup);
float top = threadgroup_max<THREADS>(best, tops, lane, simdgroup);
uint winner = threadgroup_min_uint<THREADS>(best == top ? place : 0xffffffffu, places, lane, simdgroup);
if (thread_position_in_threadgroup.x == 0) {
  uint index = row * uint(CHUNKS) + chunk;
  chunk_max[index] = largest;
  chunk_sum[index] = sum;
  chunk_score[index] = top;
  chunk_token[index] = winner;
}
