// One part of the visible columns of one new token, by a threadgroup, its lanes side by side along a head.

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
