// One part of the visible columns of one new token, by a threadgroup: two forms of one contract.

//@provides AttendByLanes
// One new token of a row against its cached keys and values: a threadgroup takes PACK query heads that share a KV head and one
// part of the visible columns. Each simdgroup walks through columns of its own, its lanes side by side along the head, so that
// one column's key is one coalesced read for all PACK heads. With PAGE the columns lie in pages of a pool, which the row's table
// names; S is the table's width then, and the capacity of the buffers else.
// `pack` counts packs of query heads over all KV heads; `memory` holds MEMORY floats.
template <class T, int D, int GROUP, int PACK, int SIMDS, int UNROLL, bool WIDE, bool TAILED, int PAGE>
struct AttendByLanes {
  static constexpr constant uint E = D / 32;  // elements of a head that a lane holds
  static constexpr constant uint PACKS = (GROUP + PACK - 1) / PACK;
  static constexpr constant int MEMORY = SIMDS * (D + 2 * PACK);

  template <class Table, class Bounds, class Settled>
  static METAL_FUNC void run(const device T* queries, const device T* keys, const device T* values, const device T* tail_keys,
                             const device T* tail_values, Bounds first, Bounds last, Settled settled, Table table, float scale, int L,
                             int S, int TAIL, int HKV, int PARTS, int BLOCK, uint part, uint pack, uint row, device float* partial,
                             device float* stats, threadgroup float* memory, uint lane, uint simd) {
    threadgroup float* merged = memory;
    threadgroup float* maxima = merged + SIMDS * D;
    threadgroup float* sums = maxima + SIMDS * PACK;
    uint kv = pack / PACKS;
    uint first_head = pack % PACKS * PACK;  // within the group
    Columns columns = part_of_columns(first[row], last[row], int(part), int(PARTS), int(BLOCK));

    float q[PACK][E], out[PACK][E], top[PACK], sum[PACK];
    for (uint h = 0; h < PACK; h++) {
      // Where the last pack is not full its last head is computed again, and not written.
      uint head = kv * GROUP + min(first_head + h, uint(GROUP - 1));
      load_lane<T, E, WIDE>(queries + (size_t(row) * HKV * GROUP + head) * D, lane, q[h]);
      top[h] = -INFINITY;
      sum[h] = 0.0f;
      for (uint e = 0; e < E; e++) {
        q[h][e] *= scale * M_LOG2E_F;
        out[h][e] = 0.0f;
      }
    }
    size_t cached_head = size_t(row / L) * HKV + kv;
    auto head_keys = keys + (PAGE > 0 ? size_t(kv) * PAGE : cached_head * size_t(S)) * D;
    auto head_values = values + (PAGE > 0 ? size_t(kv) * PAGE : cached_head * size_t(S)) * D;
    size_t tail_start = TAILED ? cached_head * size_t(TAIL) * D : 0;
    int settled_columns = TAILED ? settled[PAGE > 0 ? row / L : 0] : 0;
    auto pages = table + (PAGE > 0 ? size_t(row / L) * S : 0);

    for (int start = columns.begin + int(simd) * UNROLL; start < columns.end; start += int(SIMDS) * UNROLL) {
      float score[UNROLL][PACK];
      int page[UNROLL];
      for (int u = 0; u < UNROLL; u++) page[u] = page_of<PAGE>(pages, min(start + u, columns.end - 1), settled_columns);
      for (int u = 0; u < UNROLL; u++) {
        float k[E];
        int column = min(start + u, columns.end - 1);
        auto key = column_at<TAILED, D, PAGE>(head_keys, tail_keys + tail_start, column, settled_columns, page[u], int(HKV));
        load_lane<T, E, WIDE>(key, lane, k);
        for (uint h = 0; h < PACK; h++) {
          float dot = 0.0f;
          for (uint e = 0; e < E; e++) dot += q[h][e] * k[e];
          dot = simd_sum(dot);
          score[u][h] = start + u < columns.end ? dot : -INFINITY;
        }
      }
      for (uint h = 0; h < PACK; h++) {
        float highest = top[h];
        for (int u = 0; u < UNROLL; u++) highest = max(highest, score[u][h]);
        float keep = exp2(top[h] - highest);
        top[h] = highest;
        sum[h] *= keep;
        for (uint e = 0; e < E; e++) out[h][e] *= keep;
        for (int u = 0; u < UNROLL; u++) {
          score[u][h] = exp2(score[u][h] - highest);
          sum[h] += score[u][h];
        }
      }
      for (int u = 0; u < UNROLL; u++) {
        float v[E];
        int column = min(start + u, columns.end - 1);
        auto value = column_at<TAILED, D, PAGE>(head_values, tail_values + tail_start, column, settled_columns, page[u], int(HKV));
        load_lane<T, E, WIDE>(value, lane, v);
        for (uint h = 0; h < PACK; h++)
          for (uint e = 0; e < E; e++) out[h][e] += score[u][h] * v[e];
      }
    }

    // The simdgroups' shares become one, head after head.
    if (lane == 0) {
      for (uint h = 0; h < PACK; h++) {
        maxima[simd * PACK + h] = top[h];
        sums[simd * PACK + h] = sum[h];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint h = 0; h < PACK; h++) {
      float highest = -INFINITY, total = 0.0f;
      for (uint s = 0; s < SIMDS; s++) highest = max(highest, maxima[s * PACK + h]);
      float keep = highest == -INFINITY ? 0.0f : exp2(top[h] - highest);
      for (uint s = 0; s < SIMDS; s++)
        if (highest != -INFINITY) total += exp2(maxima[s * PACK + h] - highest) * sums[s * PACK + h];
      for (uint e = 0; e < E; e++) merged[simd * D + lane_element<T, E, WIDE>(lane, e)] = out[h][e] * keep;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (first_head + h < GROUP) {
        size_t place = (size_t(row) * HKV * GROUP + kv * GROUP + first_head + h) * PARTS + part;
        for (uint d = (simd * 32 + lane); d < D; d += SIMDS * 32) {
          float all = 0.0f;
          for (uint s = 0; s < SIMDS; s++) all += merged[s * D + d];
          partial[place * D + d] = all;
        }
        if ((simd * 32 + lane) == 0) {
          stats[place * 2] = highest;
          stats[place * 2 + 1] = total;
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
};

//@provides AttendByTensor
// As `AttendByLanes`, over tensor tiles for 16-bit floats: up to 8 query heads of a group against 16 columns at a time. Products
// do not care in which order the elements of a head are summed, so lanes read 16 bytes of keys and values as they lie and the
// tiles' columns are named accordingly: nothing is staged or shuffled.
//
// Lane l: r = l / 4, c = l % 4. Scores: A = queries (head r), B = keys (column r of 8, 8 elements from 8c in blocks of 32),
// so a lane gets head r against columns 2c, 2c + 1. That is the B operand of values' product, whose A is the values, with
// elements as rows: the lane reads columns 2c, 2c + 1, 2c + 8, 2c + 9 at 8 elements from 8r in blocks of 64.
// `pack` counts packs of query heads over all KV heads; `memory` holds MEMORY floats.
template <class T, int D, int GROUP, int SIMDS, bool TAILED, int PAGE>
struct AttendByTensor {
  static constexpr constant uint KEY_BLOCKS = D / 32, VALUE_BLOCKS = D / 64;
  static constexpr constant uint PACKS = (GROUP + 7) / 8;
  static constexpr constant int MEMORY = 8 * D + 2 * SIMDS * 8;

  template <class Table, class Bounds, class Settled>
  static METAL_FUNC void run(const device T* queries, const device T* keys, const device T* values, const device T* tail_keys,
                             const device T* tail_values, Bounds first, Bounds last, Settled settled, Table table, float scale, int L,
                             int S, int TAIL, int HKV, int PARTS, int BLOCK, uint part, uint pack, uint row, device float* partial,
                             device float* stats, threadgroup float* memory, uint lane, uint simd) {
    threadgroup float* merged = memory;
    threadgroup float* maxima = merged + 8 * D;
    threadgroup float* sums = maxima + SIMDS * 8;
    uint r = lane / 4, c = lane % 4;
    uint kv = pack / PACKS;
    uint first_head = pack % PACKS * 8;
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
          bool seen = start + int(8 * j + 2 * c + i) < columns.end;
          score[j][i] = seen ? score[j][i] * factor : -INFINITY;
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
    for (uint i = (simd * 32 + lane); i < heads * D; i += SIMDS * 32) partial[(place + i / D * PARTS) * D + i % D] = merged[i];
    if ((simd * 32 + lane) < heads) {
      uint h = (simd * 32 + lane);
      float most = -INFINITY, total = 0.0f;
      for (uint s = 0; s < SIMDS; s++) most = max(most, maxima[s * 8 + h]);
      for (uint s = 0; s < SIMDS; s++)
        if (most != -INFINITY) total += exp2(maxima[s * 8 + h] - most) * sums[s * 8 + h];
      stats[(place + h * PARTS) * 2] = most;
      stats[(place + h * PARTS) * 2 + 1] = total;
    }
  }
};
