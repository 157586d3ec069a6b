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

//@provides load_lane
// E consecutive elements as floats: in vectors, or (the baseline) one element at a time, which spreads each request of a
// simdgroup over the whole head.
template <class T, int E, bool WIDE, class P> METAL_FUNC void load_lane(P from, thread float* to) {
  if (WIDE && E % 4 == 0) {
    for (int e = 0; e < E; e += 4) {
      vec<T, 4> four = *(const device vec<T, 4>*)(from + e);
      to[e] = static_cast<float>(four.x), to[e + 1] = static_cast<float>(four.y);
      to[e + 2] = static_cast<float>(four.z), to[e + 3] = static_cast<float>(four.w);
    }
  } else {
    for (int e = 0; e < E; e++) to[e] = static_cast<float>(from[e]);
  }
}

//@provides column_at
// Where a column stands: in the buffer, or from column `settled` on in the tail. Both pointers are those of column 0 there, and
// a column is D elements long.
template <bool TAILED, int D, class P> METAL_FUNC P column_at(P buffer, P tail, int column, int settled) {
  if (!TAILED || column < settled) return buffer + size_t(column) * D;
  return tail + size_t(column - settled) * D;
}
