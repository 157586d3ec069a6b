// Each threadgroup normalises the row again, from cache, and multiplies it with the router's rows of THREADS / 32 experts, one
// a simdgroup. All that the router and the norm read is requested before anything is summed or written.
constexpr uint PACK = 32 / BITS;              // values of a word
constexpr uint WORDS = D / PACK;              // words of an expert's row
constexpr int LOADS = (WORDS + 31) / 32;      // words of a lane
constexpr int VALUES = (D + THREADS - 1) / THREADS;
threadgroup float partial[32];
threadgroup float row_[D];
uint t = thread_position_in_threadgroup.x, lane = thread_index_in_simdgroup;
size_t begin = size_t(threadgroup_position_in_grid.y) * D;
uint expert = threadgroup_position_in_grid.x * (THREADS / 32) + simdgroup_index_in_threadgroup;
bool real = expert < uint(E);

uint word[LOADS];
float factor[LOADS], offset[LOADS], weights[VALUES];
for (int i = 0; i < LOADS; i++) {
  uint w = lane + 32 * i;
  bool inside = real && w < WORDS;
  size_t group = size_t(expert) * (D / GROUP) + w * PACK / GROUP;
  word[i] = inside ? router[size_t(expert) * WORDS + w] : 0;
  factor[i] = inside ? static_cast<float>(scales[group]) : 0.0f;
  offset[i] = inside ? static_cast<float>(biases[group]) : 0.0f;
}
float h[VALUES];
#pragma unroll
for (int i = 0; i < VALUES; i++) {
  uint d = t + i * THREADS;
  h[i] = d < D ? static_cast<float>(x[begin + d]) + static_cast<float>(residual[begin + d]) : 0.0f;
  weights[i] = d < D ? static_cast<float>(weight[d]) : 0.0f;
}
float sum = 0.0f;
for (int i = 0; i < VALUES; i++) {
  uint d = t + i * THREADS;
  // Rounded before it is squared, as a separate add would leave it.
  T rounded = static_cast<T>(h[i]);
  h[i] = static_cast<float>(rounded);
  sum += h[i] * h[i];
  if (d < D && threadgroup_position_in_grid.x == 0) hidden[begin + d] = rounded;
}
sum = threadgroup_sum<THREADS>(sum, partial, lane, simdgroup_index_in_threadgroup);
float scale = metal::precise::rsqrt(sum / D + eps);
for (int i = 0; i < VALUES; i++) {
  uint d = t + i * THREADS;
  if (d >= D) break;
  T rounded = static_cast<T>(h[i] * scale * weights[i]);
  row_[d] = static_cast<float>(rounded);
  if (threadgroup_position_in_grid.x == 0) normed[begin + d] = rounded;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

float dot = 0.0f;
for (int i = 0; i < LOADS; i++) {
  uint w = lane + 32 * i;
  if (real && w < WORDS) {
    float products = 0.0f, plain = 0.0f;
    for (uint j = 0; j < PACK; j++) {
      float value = row_[w * PACK + j];
      products += value * static_cast<float>((word[i] >> (BITS * j)) & ((1u << BITS) - 1));
      plain += value;
    }
    dot += products * factor[i] + plain * offset[i];
  }
}
dot = simd_sum(dot);
if (real && lane == 0) logits[size_t(threadgroup_position_in_grid.y) * E + expert] = dot;
