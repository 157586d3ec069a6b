// A threadgroup carries WIDTH columns of one head through all tokens, their state in registers. Keys, queries, values and gates
// of TOKENS tokens at a time are staged in threadgroup memory; those of the next TOKENS are on their way in registers.
constexpr int N = DK / LANES;
constexpr int GROUPS = 32 / LANES;
constexpr int WIDTH = SIMDGROUPS * GROUPS * COLS;
constexpr int ROW = DK / 32;
constexpr int MINE = TOKENS / SIMDGROUPS;  // tokens that a simdgroup stages
constexpr int VALUES = (WIDTH + 31) / 32;
alignas(16) threadgroup float keys[TOKENS * DK];
alignas(16) threadgroup float queries[TOKENS * DK];
threadgroup float values[TOKENS * WIDTH];
alignas(16) threadgroup float gates[TOKENS * 4];

int lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
int thread_id = thread_position_in_threadgroup.x;
int b = threadgroup_position_in_grid.y / HV, hv = threadgroup_position_in_grid.y % HV, hk = hv / (HV / HK);
int column0 = threadgroup_position_in_grid.x * WIDTH;
int part = lane % LANES;
int column = (simdgroup * GROUPS + lane / LANES) * COLS;
int first = clamp(int(spans[2 * b]), 0, int(length));
int last = clamp(int(spans[2 * b + 1]), first, int(length));

size_t row = size_t(b) * length;
auto q_head = q + (row * HK + hk) * DK;
auto k_head = k + (row * HK + hk) * DK;
auto v_head = v + (row * HV + hv) * DV + column0;
auto y_head = y + (row * HV + hv) * DV + column0;
size_t state_at = (size_t(b * HV + hv) * DV + column0 + column) * DK;

for (int i = thread_id; i < first * WIDTH; i += 32 * SIMDGROUPS) {
  y_head[size_t(i / WIDTH) * HV * DV + i % WIDTH] = static_cast<T>(0.0f);
}
for (int i = last * WIDTH + thread_id; i < length * WIDTH; i += 32 * SIMDGROUPS) {
  y_head[size_t(i / WIDTH) * HV * DV + i % WIDTH] = static_cast<T>(0.0f);
}

float s[COLS * N];
load_state<DK, LANES, COLS>(state + state_at, part, s);

float next_k[MINE * ROW], next_q[MINE * ROW], next_v[MINE * VALUES], next_log_decay[MINE], next_beta[MINE];
for (int begin = first - TOKENS; begin < last; begin += TOKENS) {
  if (begin >= first) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (int r = 0; r < MINE; r++) {
      int t = simdgroup * MINE + r;
#pragma unroll
      for (int i = 0; i < ROW; i++) {
        keys[t * DK + lane * ROW + i] = next_k[r * ROW + i];
        queries[t * DK + lane * ROW + i] = next_q[r * ROW + i];
      }
#pragma unroll
      for (int i = 0; i < VALUES; i++) {
        if (lane + 32 * i < WIDTH) values[t * WIDTH + lane + 32 * i] = next_v[r * VALUES + i];
      }
      float qk = row_dot<ROW>(next_q + r * ROW, next_k + r * ROW);
      if (lane == 0) {
        gates[t * 4] = exp(next_log_decay[r]);
        gates[t * 4 + 1] = next_beta[r];
        gates[t * 4 + 2] = qk;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (begin + TOKENS < last) {
#pragma unroll
    for (int r = 0; r < MINE; r++) {
      int t = min(begin + TOKENS + simdgroup * MINE + r, last - 1);
      load_row<ROW>(q_head + size_t(t) * HK * DK, lane, next_q + r * ROW);
      load_row<ROW>(k_head + size_t(t) * HK * DK, lane, next_k + r * ROW);
#pragma unroll
      for (int i = 0; i < VALUES; i++) {
        if (lane + 32 * i < WIDTH) next_v[r * VALUES + i] = static_cast<float>(v_head[size_t(t) * HV * DV + lane + 32 * i]);
      }
      next_log_decay[r] = log_decay[(row + t) * HV + hv];
      next_beta[r] = beta[(row + t) * HV + hv];
    }
  }
  if (begin >= first) {
    int count = min(TOKENS, last - begin);
#pragma unroll 2
    for (int t = 0; t < count; t++) {
      float value[COLS], out[COLS];
#pragma unroll
      for (int c = 0; c < COLS; c++) value[c] = values[t * WIDTH + column + c];
      delta_token<DK, LANES, COLS>(
          keys + t * DK, queries + t * DK, value, gates[t * 4], gates[t * 4 + 1], gates[t * 4 + 2], part, s, out);
      if (part == 0) {
#pragma unroll
        for (int c = 0; c < COLS; c++) {
          y_head[size_t(begin + t) * HV * DV + column + c] = static_cast<T>(out[c]);
        }
      }
    }
  }
}
store_state<DK, LANES, COLS>(state_out + state_at, part, s);
