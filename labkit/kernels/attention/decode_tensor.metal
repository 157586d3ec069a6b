// As decode.metal, over tensor tiles for 16-bit floats: up to 8 query heads of a group against 16 columns at a time. Products
// do not care in which order the elements of a head are summed, so lanes read 16 bytes of keys and values as they lie and the
// tiles' columns are named accordingly: nothing is staged or shuffled.
//
// Lane l: r = l / 4, c = l % 4. Scores: A = queries (head r), B = keys (column r of 8, 8 elements from 8c in blocks of 32),
// so a lane gets head r against columns 2c, 2c + 1. That is the B operand of values' product, whose A is the values, with
// elements as rows: the lane reads columns 2c, 2c + 1, 2c + 8, 2c + 9 at 8 elements from 8r in blocks of 64.
constexpr uint KEY_BLOCKS = D / 32, VALUE_BLOCKS = D / 64;
constexpr uint PACKS = (GROUP + 7) / 8;
threadgroup float merged[8 * D];
threadgroup float maxima[SIMDS * 8];
threadgroup float sums[SIMDS * 8];

uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
uint r = lane / 4, c = lane % 4;
uint part = threadgroup_position_in_grid.x, row = threadgroup_position_in_grid.z;
uint kv = threadgroup_position_in_grid.y / PACKS;
uint first_head = threadgroup_position_in_grid.y % PACKS * 8;
Columns columns = part_of_columns(first[row], last[row], int(part), int(PARTS), int(BLOCK));

uint4 q[KEY_BLOCKS];
bool is_head = first_head + r < GROUP;
size_t query = (size_t(row) * HKV * GROUP + kv * GROUP + min(first_head + r, uint(GROUP - 1))) * D;
for (uint t = 0; t < KEY_BLOCKS; t++) {
  uint4 pairs = *(const device uint4*)(queries + query + 32 * t + 8 * c);
  q[t] = is_head ? pairs : four_words(0, 0, 0, 0);
}
float out[VALUE_BLOCKS][4][4];
for (uint t = 0; t < VALUE_BLOCKS; t++)
  for (uint j = 0; j < 4; j++)
    for (uint i = 0; i < 4; i++) out[t][j][i] = 0.0f;
float top = -INFINITY, sum = 0.0f;
size_t cached_head = size_t(row / L) * HKV + kv;
auto head_keys = keys + (PAGE > 0 ? size_t(kv) * PAGE : cached_head * size_t(S)) * D;
auto head_values = values + (PAGE > 0 ? size_t(kv) * PAGE : cached_head * size_t(S)) * D;
size_t tail_start = TAILED ? cached_head * size_t(TAIL) * D : 0;
int settled_columns = TAILED ? settled[PAGE > 0 ? row / L : 0] : 0;
auto pages = table + (PAGE > 0 ? size_t(row / L) * S : 0);
float factor = scale * M_LOG2E_F;

// A tile of 16 columns lies in one page or two of 16 and more: they are looked up a tile ahead, and no load waits for them.
constexpr bool AHEAD = PAGE >= 16;
constexpr int PAGED = PAGE > 0 ? PAGE : 1;
int end = columns.end - 1;
int here = AHEAD ? page_of<PAGE>(pages, columns.begin + int(simd) * 16, settled_columns) : 0;
int next = AHEAD ? page_of<PAGE>(pages, columns.begin + int(simd) * 16 + 15, settled_columns) : 0;
#pragma unroll 1
for (int start = columns.begin + int(simd) * 16; start < columns.end; start += int(SIMDS) * 16) {
  float score[2][4];
  int low_column = min(start + int(r), end), high_column = min(start + 8 + int(r), end), border = start / PAGED;
  int low_page = !AHEAD ? page_of<PAGE>(pages, low_column, settled_columns) : low_column / PAGED == border ? here : next;
  int high_page = !AHEAD ? page_of<PAGE>(pages, high_column, settled_columns) : high_column / PAGED == border ? here : next;
  auto low_key = column_at<TAILED, D, PAGE>(head_keys, tail_keys + tail_start, low_column, settled_columns, low_page, int(HKV));
  auto high_key = column_at<TAILED, D, PAGE>(head_keys, tail_keys + tail_start, high_column, settled_columns, high_page, int(HKV));
  uint4 low[KEY_BLOCKS], high[KEY_BLOCKS];
#pragma unroll
  for (uint t = 0; t < KEY_BLOCKS; t++) {
    low[t] = load16_stream((const device uint4*)(low_key + 32 * t + 8 * c));
    high[t] = load16_stream((const device uint4*)(high_key + 32 * t + 8 * c));
  }
  uint4 v[VALUE_BLOCKS][4];
#pragma unroll
  for (uint i = 0; i < 4; i++) {
    int column = min(start + int(2 * c + (i & 1) + (i / 2) * 8), end);
    int page = !AHEAD ? page_of<PAGE>(pages, column, settled_columns) : column / PAGED == border ? here : next;
    auto value = column_at<TAILED, D, PAGE>(head_values, tail_values + tail_start, column, settled_columns, page, int(HKV));
#pragma unroll
    for (uint t = 0; t < VALUE_BLOCKS; t++) v[t][i] = load16_stream((const device uint4*)(value + 64 * t + 8 * r));
  }
  if (AHEAD) {
    here = page_of<PAGE>(pages, start + int(SIMDS) * 16, settled_columns);
    next = page_of<PAGE>(pages, start + int(SIMDS) * 16 + 15, settled_columns);
  }
  for (uint j = 0; j < 2; j++)
    for (uint i = 0; i < 4; i++) score[j][i] = 0.0f;
#pragma unroll
  for (uint t = 0; t < KEY_BLOCKS; t++) {
    mma_16x8x16<T>(score[0], four_words(q[t].x, 0, q[t].y, 0), two_words(low[t].x, low[t].y), lane);
    mma_16x8x16<T>(score[1], four_words(q[t].x, 0, q[t].y, 0), two_words(high[t].x, high[t].y), lane);
    mma_16x8x16<T>(score[0], four_words(q[t].z, 0, q[t].w, 0), two_words(low[t].z, low[t].w), lane);
    mma_16x8x16<T>(score[1], four_words(q[t].z, 0, q[t].w, 0), two_words(high[t].z, high[t].w), lane);
  }
  float highest = top;
  for (uint j = 0; j < 2; j++) {
    for (uint i = 0; i < 2; i++) {
      bool visible = start + int(8 * j + 2 * c + i) < columns.end;
      score[j][i] = visible ? score[j][i] * factor : -INFINITY;
      highest = max(highest, score[j][i]);
    }
  }
  highest = max(highest, simd_shuffle_xor(highest, static_cast<ushort>(1)));
  highest = max(highest, simd_shuffle_xor(highest, static_cast<ushort>(2)));
  float keep = exp2(top - highest);
  top = highest;
  sum *= keep;
  for (uint j = 0; j < 2; j++) {
    for (uint i = 0; i < 2; i++) {
      score[j][i] = exp2(score[j][i] - highest);
      sum += score[j][i];
    }
  }
  uint2 p = two_words(pack_pair<T>(static_cast<T>(score[0][0]), static_cast<T>(score[0][1])),
                      pack_pair<T>(static_cast<T>(score[1][0]), static_cast<T>(score[1][1])));
  float keep_even = simd_shuffle(keep, static_cast<ushort>(8 * c)), keep_odd = simd_shuffle(keep, static_cast<ushort>(8 * c + 4));
#pragma unroll
  for (uint t = 0; t < VALUE_BLOCKS; t++) {
#pragma unroll
    for (uint j = 0; j < 4; j++) {
      out[t][j][0] *= keep_even, out[t][j][1] *= keep_odd, out[t][j][2] *= keep_even, out[t][j][3] *= keep_odd;
      uint a = j == 0 ? v[t][0].x : j == 1 ? v[t][0].y : j == 2 ? v[t][0].z : v[t][0].w;
      uint b = j == 0 ? v[t][1].x : j == 1 ? v[t][1].y : j == 2 ? v[t][1].z : v[t][1].w;
      uint d = j == 0 ? v[t][2].x : j == 1 ? v[t][2].y : j == 2 ? v[t][2].z : v[t][2].w;
      uint e = j == 0 ? v[t][3].x : j == 1 ? v[t][3].y : j == 2 ? v[t][3].z : v[t][3].w;
      mma_16x8x16<T>(out[t][j], four_words(low_halves(a, b), high_halves(a, b), low_halves(d, e), high_halves(d, e)), p, lane);
    }
  }
}
sum += simd_shuffle_xor(sum, static_cast<ushort>(1));
sum += simd_shuffle_xor(sum, static_cast<ushort>(2));

// The simdgroups' shares become one, in a fixed order.
if (c == 0) {
  maxima[simd * 8 + r] = top;
  sums[simd * 8 + r] = sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
float highest[2], keep[2];
for (uint i = 0; i < 2; i++) {
  highest[i] = -INFINITY;
  for (uint s = 0; s < SIMDS; s++) highest[i] = max(highest[i], maxima[s * 8 + 2 * c + i]);
  keep[i] = highest[i] == -INFINITY ? 0.0f : exp2(maxima[simd * 8 + 2 * c + i] - highest[i]);
}
for (uint s = 0; s < SIMDS; s++) {
  if (simd == s) {
    for (uint t = 0; t < VALUE_BLOCKS; t++) {
      for (uint j = 0; j < 4; j++) {
        for (uint i = 0; i < 4; i++) {
          threadgroup float* place = merged + (2 * c + i % 2) * D + 64 * t + 8 * r + 2 * j + i / 2;
          float share = out[t][j][i] * keep[i % 2];
          *place = s == 0 ? share : *place + share;
        }
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
uint heads = min(uint(GROUP) - first_head, 8u);
size_t place = (size_t(row) * HKV * GROUP + kv * GROUP + first_head) * PARTS + part;
for (uint i = thread_index_in_threadgroup; i < heads * D; i += SIMDS * 32) partial[(place + i / D * PARTS) * D + i % D] = merged[i];
if (thread_index_in_threadgroup < heads) {
  uint h = thread_index_in_threadgroup;
  float most = -INFINITY, total = 0.0f;
  for (uint s = 0; s < SIMDS; s++) most = max(most, maxima[s * 8 + h]);
  for (uint s = 0; s < SIMDS; s++)
    if (most != -INFINITY) total += exp2(maxima[s * 8 + h] - most) * sums[s * 8 + h];
  stats[(place + h * PARTS) * 2] = most;
  stats[(place + h * PARTS) * 2 + 1] = total;
}
