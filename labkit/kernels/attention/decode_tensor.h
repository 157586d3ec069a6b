// One part of the visible columns of one new token, by a threadgroup, over tensor tiles: the contract of `AttendByLanes`.

//@provides four_floats
METAL_FUNC float4 four_floats(float x, float y, float z, float w) {
  float4 v;
  v.x = x, v.y = y, v.z = z, v.w = w;
  return v;
}

//@provides AttendByTensor
// For 16-bit floats: up to 8 query heads of a group against 16 columns at a time. Products do not care in which order the elements
// of a head are summed, so lanes read 16 bytes of keys and values as they lie and the tiles' columns are named accordingly: nothing
// of them is staged or shuffled.
//
// Lane l: r = l / 4, c = l % 4. Scores: A = queries (head r), B = keys (column r of 8, 8 elements from 8c in blocks of 32),
// so a lane gets head r against columns 2c, 2c + 1. That is the B operand of values' product, whose A is the values, with
// elements as rows: the lane reads columns 2c, 2c + 1, 2c + 8, 2c + 9 at 8 elements from 8r in blocks of 64.
//
// A simdgroup asks for all keys and values of a tile before it uses any, and for the next tile's keys as soon as this one's are
// used, then for its values: memory is never without work. Queries lie in threadgroup memory, for their registers are needed.
// `pack` counts packs of query heads over all KV heads; `memory` holds MEMORY floats, aligned to 16 bytes.
template <class T, int D, int GROUP, int SIMDS, bool TAILED, int PAGE>
struct AttendByTensor {
  static constexpr constant uint KEY_BLOCKS = D / 32, VALUE_BLOCKS = D / 64;
  static constexpr constant uint PACKS = (GROUP + 7) / 8;
  // Value blocks that simdgroups add at once.
  static constexpr constant uint FITTING = SIMDS < 8 ? 8 / SIMDS : 1, AT_ONCE = FITTING < VALUE_BLOCKS ? FITTING : VALUE_BLOCKS;
  static constexpr constant int SHARES = int(SIMDS * AT_ONCE) * 512;
  static constexpr constant int MEMORY = SHARES + 2 * SIMDS * 8;
  // A tile of 16 columns lies in one page or two of 16 and more: they are looked up a tile ahead, and no load waits for them.
  static constexpr constant bool AHEAD = PAGE >= 16;

  // 16 columns from `start` on, none behind `end`, and the pages of the first and the last one.
  struct Tile {
    int start, end, settled, heads, here, next;

    template <class Table> METAL_FUNC void look_up(Table pages, int at) {
      if (AHEAD) here = page_of<PAGE>(pages, at, settled), next = page_of<PAGE>(pages, at + 15, settled);
    }

    template <class Table> METAL_FUNC const device T* column(const device T* buffer, const device T* tail, Table pages, uint i) const {
      constexpr int N = PAGE > 0 ? PAGE : 1;
      int column = min(start + int(i), end);
      int page = !AHEAD ? page_of<PAGE>(pages, column, settled) : column / N == start / N ? here : next;
      return column_at<TAILED, D, PAGE>(buffer, tail, column, settled, page, heads);
    }
  };

  template <class Table>
  static METAL_FUNC void load_keys(const device T* keys, const device T* tail, Table pages, Tile tile, bool wanted, uint r, uint c,
                                   thread uint4* low, thread uint4* high) {
    const device T* low_key = tile.column(keys, tail, pages, r) + 8 * c;
    const device T* high_key = tile.column(keys, tail, pages, 8 + r) + 8 * c;
#pragma unroll
    for (uint t = 0; t < KEY_BLOCKS; t++) {
      low[t] = load16_stream((const device uint4*)(low_key + 32 * t), wanted);
      high[t] = load16_stream((const device uint4*)(high_key + 32 * t), wanted);
    }
  }

  template <class Table>
  static METAL_FUNC void load_values(const device T* values, const device T* tail, Table pages, Tile tile, bool wanted, uint r, uint c,
                                     thread uint4* v) {
#pragma unroll
    for (uint i = 0; i < 4; i++) {
      const device T* value = tile.column(values, tail, pages, 2 * c + i % 2 + i / 2 * 8) + 8 * r;
#pragma unroll
      for (uint t = 0; t < VALUE_BLOCKS; t++) v[t * 4 + i] = load16_stream((const device uint4*)(value + 64 * t), wanted);
    }
  }

  template <class Table, class Bounds, class Settled>
  static METAL_FUNC void run(const device T* queries, const device T* keys, const device T* values, const device T* tail_keys,
                             const device T* tail_values, Bounds first, Bounds last, Settled settled, Table table, float scale, int L,
                             int S, int TAIL, int HKV, int PARTS, int BLOCK, uint part, uint pack, uint row, device float* partial,
                             device float* stats, threadgroup float* memory, uint lane, uint simd) {
    threadgroup uint4* q = (threadgroup uint4*)memory;  // until the last tile is done
    threadgroup float4* shares = (threadgroup float4*)memory;
    threadgroup float* maxima = memory + SHARES;
    threadgroup float* sums = maxima + SIMDS * 8;
    uint r = lane / 4, c = lane % 4;
    uint kv = pack / PACKS;
    uint first_head = pack % PACKS * 8;
    Columns columns = part_of_columns(first[row], last[row], int(part), int(PARTS), int(BLOCK));

    constexpr uint ROUNDS = (KEY_BLOCKS + SIMDS - 1) / SIMDS;
    size_t query = (size_t(row) * HKV * GROUP + kv * GROUP + min(first_head + r, uint(GROUP - 1))) * D;
    uint4 asked[ROUNDS];
#pragma unroll
    for (uint i = 0; i < ROUNDS; i++) {
      uint t = simd + i * SIMDS;
      asked[i] = load16_if((const device uint4*)(queries + query + 32 * t + 8 * c), first_head + r < GROUP && t < KEY_BLOCKS);
    }
    float out[VALUE_BLOCKS][4][4];
    for (uint t = 0; t < VALUE_BLOCKS; t++)
      for (uint j = 0; j < 4; j++)
        for (uint i = 0; i < 4; i++) out[t][j][i] = 0.0f;
    float top = -INFINITY, sum = 0.0f;
    size_t cached_head = size_t(row / L) * HKV + kv;
    size_t head_start = (PAGE > 0 ? size_t(kv) * PAGE : cached_head * size_t(S)) * D;
    size_t tail_start = TAILED ? cached_head * size_t(TAIL) * D : 0;
    const device T* head_keys = keys + head_start;
    const device T* head_values = values + head_start;
    auto pages = table + (PAGE > 0 ? size_t(row / L) * S : 0);
    float factor = scale * M_LOG2E_F;

    constexpr int STRIDE = SIMDS * 16;
    Tile tile;
    tile.start = columns.begin + int(simd) * 16, tile.end = columns.end - 1;
    tile.settled = TAILED ? settled[PAGE > 0 ? row / L : 0] : 0, tile.heads = HKV;
    tile.look_up(pages, tile.start);
    uint4 low[KEY_BLOCKS], high[KEY_BLOCKS], v[VALUE_BLOCKS * 4];
    bool any = tile.start < columns.end;
    load_keys(head_keys, tail_keys + tail_start, pages, tile, any, r, c, low, high);
    load_values(head_values, tail_values + tail_start, pages, tile, any, r, c, v);
    tile.look_up(pages, tile.start + STRIDE);
#pragma unroll
    for (uint i = 0; i < ROUNDS; i++)
      if (simd + i * SIMDS < KEY_BLOCKS) q[(simd + i * SIMDS) * 32 + lane] = asked[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll 1
    for (int start = tile.start; start < columns.end; start += STRIDE) {
      float score[2][4];
      for (uint j = 0; j < 2; j++)
        for (uint i = 0; i < 4; i++) score[j][i] = 0.0f;
#pragma unroll
      for (uint t = 0; t < KEY_BLOCKS; t++) {
        uint4 pairs = q[t * 32 + lane];
        mma_16x8x16<T>(score[0], four_words(pairs.x, 0, pairs.y, 0), two_words(low[t].x, low[t].y), lane);
        mma_16x8x16<T>(score[1], four_words(pairs.x, 0, pairs.y, 0), two_words(high[t].x, high[t].y), lane);
        mma_16x8x16<T>(score[0], four_words(pairs.z, 0, pairs.w, 0), two_words(low[t].z, low[t].w), lane);
        mma_16x8x16<T>(score[1], four_words(pairs.z, 0, pairs.w, 0), two_words(high[t].z, high[t].w), lane);
      }
      tile.start = start + STRIDE;
      bool more = tile.start < columns.end;
      if (more) load_keys(head_keys, tail_keys + tail_start, pages, tile, true, r, c, low, high);
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
          uint a = j == 0 ? v[t * 4 + 0].x : j == 1 ? v[t * 4 + 0].y : j == 2 ? v[t * 4 + 0].z : v[t * 4 + 0].w;
          uint b = j == 0 ? v[t * 4 + 1].x : j == 1 ? v[t * 4 + 1].y : j == 2 ? v[t * 4 + 1].z : v[t * 4 + 1].w;
          uint d = j == 0 ? v[t * 4 + 2].x : j == 1 ? v[t * 4 + 2].y : j == 2 ? v[t * 4 + 2].z : v[t * 4 + 2].w;
          uint e = j == 0 ? v[t * 4 + 3].x : j == 1 ? v[t * 4 + 3].y : j == 2 ? v[t * 4 + 3].z : v[t * 4 + 3].w;
          mma_16x8x16<T>(out[t][j], four_words(low_halves(a, b), high_halves(a, b), low_halves(d, e), high_halves(d, e)), p, lane);
        }
      }
      if (more) {
        load_values(head_values, tail_values + tail_start, pages, tile, true, r, c, v);
        tile.look_up(pages, tile.start + STRIDE);
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
    uint heads = min(uint(GROUP) - first_head, 8u);
    size_t place = (size_t(row) * HKV * GROUP + kv * GROUP + first_head) * PARTS + part;
    for (uint block = 0; block < VALUE_BLOCKS; block += AT_ONCE) {
      if (block > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
      for (uint t = 0; t < VALUE_BLOCKS; t++) {
        if (t < block || t >= block + AT_ONCE) continue;
#pragma unroll
        for (uint j = 0; j < 4; j++) {
          const thread float* share = out[t][j];
          shares[((simd * AT_ONCE + t - block) * 4 + j) * 32 + lane] =
              four_floats(share[0] * keep[0], share[1] * keep[1], share[2] * keep[0], share[3] * keep[1]);
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      // Four neighbouring elements of two heads.
#pragma unroll
      for (uint item = simd; item < 2 * min(AT_ONCE, VALUE_BLOCKS - block); item += SIMDS) {
        threadgroup const float4* from = shares + item * 64 + lane;
        float4 left = from[0], right = from[32];
#pragma unroll
        for (uint s = 1; s < SIMDS; s++) left += from[s * AT_ONCE * 128], right += from[s * AT_ONCE * 128 + 32];
        device float* to = partial + (place + 2 * c * PARTS) * D + 64 * (block + item / 2) + 8 * r + 4 * (item % 2);
        if (2 * c < heads) *(device float4*)to = four_floats(left.x, left.z, right.x, right.z);
        if (2 * c + 1 < heads) *(device float4*)(to + size_t(PARTS) * D) = four_floats(left.y, left.w, right.y, right.w);
      }
    }
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
