// Shared by the routing kernels. Experts fit in 16 bits; an assignment is one (token, slot) pair, flat index token * k + slot.

//@provides ordered_bits ordered_float clean
// Bits whose unsigned order is the floats' order. 0 is below every float, so it marks what is absent.
METAL_FUNC uint ordered_bits(float x) {
  uint u = as_type<uint>(x);
  return (u & 0x80000000u) ? ~u : (u | 0x80000000u);
}
METAL_FUNC float ordered_float(uint key) {
  return as_type<float>((key & 0x80000000u) ? (key & 0x7fffffffu) : ~key);
}
// NaN counts as -inf and +inf as the largest float, so that one bad logit cannot make a whole row NaN. One zero, since bits would
// order two: -0 + 0 is 0.
METAL_FUNC float clean(float x) {
  return select(min(x + 0.0f, 3.402823466e38f), -INFINITY, isnan(x));
}

//@provides choose_best
// The first `rounds` of a row's K best experts by one simdgroup: lane l holds the scores of experts l, l + 32, ... and returns choice
// number l, best first, equal scores by the lower expert.
template <int E, bool SIGMOID, bool BIASED, class Row, class Bias>
METAL_FUNC uint choose_best(Row row, Bias bias, uint rounds, uint lane) {
  constexpr int PER_LANE = (E + 31) / 32;
  uint keys[PER_LANE];
  for (int i = 0; i < PER_LANE; i++) {
    uint e = lane + 32 * i;
    keys[i] = 0;
    if (e < uint(E)) {
      float x = clean(static_cast<float>(row[e]));
      if (SIGMOID) x = 1.0f / (1.0f + exp(-x));
      if (BIASED) x = clean(x + static_cast<float>(bias[e]));
      keys[i] = ordered_bits(x);
    }
  }
  uint mine = 0;
#pragma unroll 1
  for (uint k = 0; k < rounds; k++) {
    uint best = 0, at = 0xffffffffu;
    for (int i = 0; i < PER_LANE; i++) best = max(best, keys[i]);
    uint top = simd_max(best);
    for (int i = PER_LANE - 1; i >= 0; i--) {
      if (keys[i] == top) at = lane + 32 * i;
    }
    uint winner = simd_min(at);
    for (int i = 0; i < PER_LANE; i++) {
      if (lane + 32 * i == winner) keys[i] = 0;
    }
    if (lane == k) mine = winner;
  }
  return mine;
}

//@provides Choice choose
struct Choice {
  uint expert;
  float weight;
};

// A row's K best with their weights, which are 0 where every chosen score is 0: lane l returns choice number l.
template <int E, int K, bool SIGMOID, bool BIASED, bool RENORMALISE, class Row, class Bias>
METAL_FUNC Choice choose(Row row, Bias bias, float scale, uint lane) {
  uint mine = choose_best<E, SIGMOID, BIASED>(row, bias, uint(K), lane);
  float x = lane < uint(K) ? clean(static_cast<float>(row[mine])) : -INFINITY, score = 0.0f, sum = 0.0f;
  if (SIGMOID) {
    if (lane < uint(K)) score = 1.0f / (1.0f + exp(-x));
  } else {
    float largest = max(x, -3.402823466e38f);
    if (!RENORMALISE) {
      for (uint e = lane; e < uint(E); e += 32) largest = max(largest, clean(static_cast<float>(row[e])));
    }
    largest = simd_max(largest);
    if (!RENORMALISE) {
      for (uint e = lane; e < uint(E); e += 32) sum += exp(clean(static_cast<float>(row[e])) - largest);
      sum = simd_sum(sum);
    }
    score = exp(x - largest);
  }
  if (RENORMALISE) sum = simd_sum(score);
  if (RENORMALISE || !SIGMOID) score = sum > 0.0f ? score / sum : 0.0f;
  return {mine, score * scale};
}

//@provides choose_slot
// The same with SHARED further slots behind the K, for a shared expert that runs as experts E and following, with the sigmoid of
// logit E as their weight: lane l returns slot l.
template <int E, int K, int SHARED, bool SIGMOID, bool BIASED, bool RENORMALISE, class Row, class Bias>
METAL_FUNC Choice choose_slot(Row row, Bias bias, float scale, uint lane) {
  Choice choice = choose<E, K, SIGMOID, BIASED, RENORMALISE>(row, bias, scale, lane);
  if (SHARED > 0 && lane >= uint(K) && lane < uint(K + SHARED)) {
    choice.expert = E + lane - K;
    choice.weight = 1.0f / (1.0f + exp(-static_cast<float>(row[E])));
  }
  return choice;
}

//@provides count_of
// How many of the first n assignments of a block chose an expert. The list is padded to fours with 0xffff.
METAL_FUNC uint count_of(threadgroup const ushort4* chosen, uint n, uint expert) {
  uint count = 0;
  for (uint i = 0; 4 * i < n; i++) {
    ushort4 four = chosen[i];
    count += uint(four.x == expert) + uint(four.y == expert) + uint(four.z == expert) + uint(four.w == expert);
  }
  return count;
}

//@provides rank_of
// How many assignments of the block before number i chose the same expert.
METAL_FUNC uint rank_of(threadgroup const ushort4* chosen, uint i) {
  uint expert = ((threadgroup const ushort*)chosen)[i];
  uint rank = count_of(chosen, i & ~3u, expert);
  for (uint j = i & ~3u; j < i; j++) rank += uint(((threadgroup const ushort*)chosen)[j] == expert);
  return rank;
}

//@provides scan_experts
// Exclusive prefix sums over experts of the rows and of the blocks of `tile` rows, by a whole threadgroup in which thread e
// brings expert e's rows. Leaves E + 1 of each, to be read behind a barrier; `sums` holds two words a simdgroup.
template <int E>
METAL_FUNC void scan_experts(uint rows, uint tile, uint thread_, uint lane, uint simdgroup, threadgroup uint* first_row,
                         threadgroup uint* first_block, threadgroup uint2* sums) {
  constexpr uint SIMDGROUPS = (E + 31) / 32;
  uint mine = thread_ < uint(E) ? rows : 0;
  uint blocks = (mine + tile - 1) / tile;
  uint rows_before = simd_prefix_exclusive_sum(mine), blocks_before = simd_prefix_exclusive_sum(blocks);
  if (lane == 31 && simdgroup < SIMDGROUPS) {
    sums[simdgroup].x = rows_before + mine;
    sums[simdgroup].y = blocks_before + blocks;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_ < uint(E)) {
    for (uint s = 0; s < simdgroup; s++) {
      uint2 sum = sums[s];
      rows_before += sum.x;
      blocks_before += sum.y;
    }
    first_row[thread_] = rows_before;
    first_block[thread_] = blocks_before;
  }
  if (thread_ == uint(E) - 1) {
    first_row[E] = rows_before + mine;
    first_block[E] = blocks_before + blocks;
  }
}

//@provides map_block
// Entry j of the block map: the expert whose blocks include number j, by bisection.
template <int E>
METAL_FUNC int4 map_block(uint j, uint tile, threadgroup const uint* first_row, threadgroup const uint* first_block) {
  int4 entry;
  entry.x = entry.y = entry.z = entry.w = 0;
  if (j >= first_block[E]) return entry;
  uint low = 0, high = E;  // first_block[low] <= j < first_block[high]
  while (high - low > 1) {
    uint middle = (low + high) / 2;
    if (first_block[middle] <= j) low = middle;
    else high = middle;
  }
  uint row = first_row[low] + (j - first_block[low]) * tile;
  entry.x = int(low);
  entry.y = int(row);
  entry.z = int(min(tile, first_row[low + 1] - row));
  return entry;
}
