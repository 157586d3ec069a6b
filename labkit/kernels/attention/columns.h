// Which cached columns a threadgroup of decode attention reads, where they stand, and how a lane reads its share of a head.

//@provides Columns part_of_columns
struct Columns {
  int begin, end;
};
// Part `part` of the visible columns [first, last). Without a block size they are cut into `parts` equal shares; with one,
// part p is the block of columns from first + p * block on, so that sums depend neither on how many columns follow, nor on
// the neighbours and the padding that they bring.
METAL_FUNC Columns part_of_columns(int first, int last, int part, int parts, int block) {
  Columns columns;
  int share = block > 0 ? block : (max(last - first, 0) + parts - 1) / parts;
  columns.begin = first + part * share;
  columns.end = min(last, columns.begin + share);
  return columns;
}

//@provides LaneVector lane_element load_lane
// A lane's E elements of a head lie in vectors of up to 16 bytes, and one vector of all lanes side by side: each request of a
// simdgroup is one run of bytes. (The baseline, one element at a time, spreads each request over the whole head.)
template <class T, int E, bool WIDE> struct LaneVector {
  static constexpr constant int N = !WIDE ? E : E % 8 == 0 && sizeof(T) == 2 ? 8 : E % 4 == 0 ? 4 : E % 2 == 0 ? 2 : 1;
};
// Where a lane's element e stands in its head.
template <class T, int E, bool WIDE> METAL_FUNC uint lane_element(uint lane, uint e) {
  constexpr uint N = LaneVector<T, E, WIDE>::N;
  return (e / N * 32 + lane) * N + e % N;
}
template <class T, int E, bool WIDE, class P> METAL_FUNC void load_lane(P head, uint lane, thread float* to) {
  constexpr int N = WIDE ? LaneVector<T, E, WIDE>::N : 0;
  if (N == 0) {
    for (int e = 0; e < E; e++) to[e] = static_cast<float>(head[lane * E + e]);
  }
  for (int e = 0; N > 0 && e < E; e += N > 0 ? N : 1) {
    P from = head + lane_element<T, E, WIDE>(lane, e);
    if (N == 8) {
      uint4 pairs = *(const device uint4*)from;
      to[e] = float_low<T>(pairs.x), to[e + 1] = float_high<T>(pairs.x);
      to[e + 2] = float_low<T>(pairs.y), to[e + 3] = float_high<T>(pairs.y);
      to[e + 4] = float_low<T>(pairs.z), to[e + 5] = float_high<T>(pairs.z);
      to[e + 6] = float_low<T>(pairs.w), to[e + 7] = float_high<T>(pairs.w);
    } else if (N == 4) {
      vec<T, 4> four = *(const device vec<T, 4>*)from;
      to[e] = static_cast<float>(four.x), to[e + 1] = static_cast<float>(four.y);
      to[e + 2] = static_cast<float>(four.z), to[e + 3] = static_cast<float>(four.w);
    } else if (N == 2) {
      vec<T, 2> two = *(const device vec<T, 2>*)from;
      to[e] = static_cast<float>(two.x), to[e + 1] = static_cast<float>(two.y);
    } else {
      to[e] = static_cast<float>(from[0]);
    }
  }
}

//@provides column_at
// Where a column stands: from column `settled` on in the tail, before it in the buffer. A buffer of pages holds PAGE columns of
// each of `heads` heads together, and `page` says which one holds this column. All pointers are those of column 0 of a head,
// and a column is D elements long.
template <bool TAILED, int D, int PAGE, class P> METAL_FUNC P column_at(P buffer, P tail, int column, int settled, int page, int heads) {
  if (TAILED && column >= settled) return tail + size_t(column - settled) * D;
  if (PAGE == 0) return buffer + size_t(column) * D;
  constexpr int N = PAGE > 0 ? PAGE : 1;
  return buffer + (size_t(page) * heads * N + column % N) * D;
}

//@provides page_of
// The page of a column before `settled`; any page for one behind.
template <int PAGE, class P> METAL_FUNC int page_of(P table, int column, int settled) {
  return PAGE > 0 ? table[min(column, max(settled - 1, 0)) / (PAGE > 0 ? PAGE : 1)] : 0;
}
