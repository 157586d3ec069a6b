// A threadgroup takes a row. The filters keep an upper set of the tokens, ordered by (logit, lower index first): if the best
// perturbed token of all is kept, it is the draw; if not, nobody below it is kept either, and the search goes on among those
// above it. Each round needs the number and the mass of the tokens above the candidate, and reads only chunks that have any.
threadgroup float maxima[32];
threadgroup float sums[32];
threadgroup float counts[32];
threadgroup float tops[32];
threadgroup uint places[32];
uint t = thread_position_in_threadgroup.x;
uint lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
uint row = threadgroup_position_in_grid.x;
uint first = row * uint(CHUNKS);
auto row_logits = logits + size_t(row) * V;
auto row_mask = mask + size_t(row) * W;

float largest = -INFINITY, best = -INFINITY;
uint place = 0xffffffffu;
for (uint c = t; c < uint(CHUNKS); c += THREADS) {
  largest = max(largest, chunk_max[first + c]);
  if (chunk_score[first + c] > best) {
    best = chunk_score[first + c];
    place = chunk_token[first + c];
  }
}
largest = threadgroup_max<THREADS>(largest, maxima, lane, simdgroup);
float origin = max(largest, -3.402823466e38f);
float total = 0.0f;
for (uint c = t; c < uint(CHUNKS); c += THREADS) {
  total += chunk_sum[first + c] * metal::precise::exp(chunk_max[first + c] - origin);
}
total = threadgroup_sum<THREADS>(total, sums, lane, simdgroup);
float top = threadgroup_max<THREADS>(best, tops, lane, simdgroup);
uint token = threadgroup_min_uint<THREADS>(best == top ? place : 0xffffffffu, places, lane, simdgroup);

float chosen = -INFINITY;
if (largest == -INFINITY) {
  token = 0;  // nothing is allowed
} else {
  chosen = static_cast<float>(row_logits[token]);
  chosen = min(chosen, 3.402823466e38f);
  float heat = temperature[row], keep_mass = top_p[row];
  int keep = top_k[row];
  bool by_mass = FILTERED && keep_mass > 0.0f && keep_mass < 1.0f, by_number = FILTERED && keep > 0 && keep < V;
  float floor_ = min_p[row] > 0.0f ? largest + metal::precise::log(min_p[row]) : -INFINITY;
  bool is_candidate = chosen >= floor_;
  bool done = heat < 1e-6f || (is_candidate && !by_mass && !by_number);
  while (!done) {
    // Who is above the candidate, or at least at min-p's floor if the candidate is not.
    float bound = is_candidate ? chosen : floor_;
    uint bound_token = is_candidate ? token : 0xffffffffu;
    float above = 0.0f, mass = 0.0f;
    best = -INFINITY;
    place = 0xffffffffu;
    for (uint c = simdgroup; c < uint(CHUNKS); c += THREADS / 32) {
      if (chunk_max[first + c] < bound) continue;
      for (uint s = 0; s < CHUNK / 128; s++) {
        uint strip = c * (CHUNK / 128) + s;
        Strip x = load_strip<MASKED>(row_logits, row_mask, strip, lane, uint(V));
        bool any_above = false;
        for (uint j = 0; j < 4; j++) {
          bool higher = x.x[j] > bound;
          bool in = higher || (x.x[j] == bound && 128 * strip + 32 * j + lane < bound_token);
          above += in ? 1.0f : 0.0f;
          mass += higher ? metal::precise::exp(x.x[j] - origin) : 0.0f;
          any_above = any_above || in;
          if (!in) x.x[j] = -INFINITY;
        }
        if (any_above) {
          Strip score = perturb(x, heat, strip, lane, uint(steps[row]), seeds[row]);
          for (uint j = 0; j < 4; j++) {
            if (score.x[j] > best) {
              best = score.x[j];
              place = 128 * strip + 32 * j + lane;
            }
          }
        }
      }
    }
    above = threadgroup_sum<THREADS>(above, counts, lane, simdgroup);
    mass = threadgroup_sum<THREADS>(mass, sums, lane, simdgroup);
    top = threadgroup_max<THREADS>(best, tops, lane, simdgroup);
    uint winner = threadgroup_min_uint<THREADS>(best == top ? place : 0xffffffffu, places, lane, simdgroup);
    done = is_candidate && (!by_number || above < float(keep)) && (!by_mass || mass < keep_mass * total);
    if (!done) {
      token = winner;
      chosen = min(static_cast<float>(row_logits[token]), 3.402823466e38f);
      is_candidate = true;
      done = !by_number && !by_mass;
    }
  }
}
if (t == 0) {
  tokens[row] = token;
  logprobs[row] = largest == -INFINITY ? -INFINITY : chosen - origin - metal::precise::log(total);
}
