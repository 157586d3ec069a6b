// The baseline: the state lives in device memory and visits threadgroup memory for TOKENS tokens at a time, and the threads that
// share a column add their parts behind barriers. A sequence of T tokens moves the state 2 T / TOKENS times.
constexpr int PARTS = THREADS / WIDTH, N = DK / PARTS;
threadgroup float tile[DK * WIDTH];  // a key dimension's values of all columns are neighbours
threadgroup float seen[PARTS * WIDTH];
threadgroup float answered[PARTS * WIDTH];

int thread_id = thread_position_in_threadgroup.x;
int head = threadgroup_position_in_grid.y, b = head / HV, hv = head % HV, hk = hv / (HV / HK);
int column0 = threadgroup_position_in_grid.x * WIDTH, column = thread_id % WIDTH, part = thread_id / WIDTH;
int first = clamp(int(spans[2 * b]), 0, int(length));
int last = clamp(int(spans[2 * b + 1]), first, int(length));
size_t row = size_t(b) * length;
size_t state_at = (size_t(head) * DV + column0) * DK;

for (int t = part; t < length; t += PARTS) {
  if (t < first || t >= last) y[((row + t) * HV + hv) * DV + column0 + column] = static_cast<T>(0.0f);
}
for (int i = thread_id; i < DK * WIDTH; i += THREADS) state_out[state_at + i] = state[state_at + i];

// A thread takes out what it put back itself, behind a token's last barrier: between blocks none is needed.
for (int begin = first; begin < last; begin += TOKENS) {
  for (int i = thread_id; i < DK * WIDTH; i += THREADS) tile[i % DK * WIDTH + i / DK] = state_out[state_at + i];
  for (int t = begin; t < min(begin + TOKENS, last); t++) {
    auto key = k + ((row + t) * HK + hk) * DK + part * N;
    auto query = q + ((row + t) * HK + hk) * DK + part * N;
    float decay = exp(log_decay[(row + t) * HV + hv]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float sum = 0.0f;
    for (int i = 0; i < N; i++) sum = fma(tile[(part * N + i) * WIDTH + column], static_cast<float>(key[i]), sum);
    seen[part * WIDTH + column] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum = 0.0f;
    for (int i = 0; i < PARTS; i++) sum += seen[i * WIDTH + column];
    float value = static_cast<float>(v[((row + t) * HV + hv) * DV + column0 + column]);
    float delta = beta[(row + t) * HV + hv] * fma(-decay, sum, value);
    sum = 0.0f;
    for (int i = 0; i < N; i++) {
      int at = (part * N + i) * WIDTH + column;
      tile[at] = fma(delta, static_cast<float>(key[i]), decay * tile[at]);
      sum = fma(tile[at], static_cast<float>(query[i]), sum);
    }
    answered[part * WIDTH + column] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (part == 0) {
      sum = 0.0f;
      for (int i = 0; i < PARTS; i++) sum += answered[i * WIDTH + column];
      y[((row + t) * HV + hv) * DV + column0 + column] = static_cast<T>(sum);
    }
  }
  for (int i = thread_id; i < DK * WIDTH; i += THREADS) state_out[state_at + i] = tile[i % DK * WIDTH + i / DK];
}
