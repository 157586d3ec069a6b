// Metal's 8x8 matrices by shuffles: right everywhere, and slow, 32 of them a product. A kernel that lives on products takes the
// tensor cores (labkit/kernels/headers/tiles).

//@provides simdgroup_matrix make_filled_simdgroup_matrix simdgroup_load simdgroup_store simdgroup_multiply_accumulate simdgroup_multiply simdgroup_float8x8 simdgroup_half8x8 simdgroup_bfloat8x8
namespace metal {
// Where a lane's two elements lie, as on Apple's chips: in one row, in neighbouring columns.
struct lk_spot {
  uint row, column;
  LK_DEVICE static lk_spot mine() {
    uint lane = LK_LANE;
    return {lane / 16 * 4 + lane / 2 % 4, lane / 8 % 2 * 4 + lane % 2 * 2};
  }
  LK_DEVICE uint lane() const { return row / 4 * 16 + column / 4 * 8 + row % 4 * 2 + column / 2 % 2; }
};
template <class T, int ROWS, int COLUMNS> struct simdgroup_matrix {
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  LK_DEVICE explicit simdgroup_matrix(T diagonal) {
    lk_spot spot = lk_spot::mine();
    for (uint i = 0; i < 2; i++) elements[i] = spot.column + i == spot.row ? diagonal : T(0.0f);
  }
  LK_DEVICE vec<T, 2>& thread_elements() { return elements; }
};
template <class T> using lk_matrix = simdgroup_matrix<T, 8, 8>;
using simdgroup_float8x8 = lk_matrix<float>; using simdgroup_half8x8 = lk_matrix<__half>; using simdgroup_bfloat8x8 = lk_matrix<__nv_bfloat16>;
template <class T, int ROWS, int COLUMNS> LK_DEVICE simdgroup_matrix<T, ROWS, COLUMNS> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, ROWS, COLUMNS> filled;
  filled.elements = vec<T, 2>(value);
  return filled;
}
// Where an element lies in memory, i columns right of the lane's spot.
LK_DEVICE ulong lk_offset(uint i, ulong pitch, ulong2 origin, bool transpose) {
  lk_spot spot = lk_spot::mine();
  ulong row = transpose ? spot.column + i : spot.row, column = transpose ? spot.row : spot.column + i;
  return (origin.y + row) * pitch + origin.x + column;
}
template <class T, class P>
LK_DEVICE void simdgroup_load(lk_matrix<T>& matrix, const P* from, ulong pitch = 8, ulong2 origin = ulong2(0ul), bool transpose = false) {
  for (uint i = 0; i < 2; i++) matrix.elements[i] = T(from[lk_offset(i, pitch, origin, transpose)]);
}
template <class T, class P>
LK_DEVICE void simdgroup_store(lk_matrix<T> matrix, P* to, ulong pitch = 8, ulong2 origin = ulong2(0ul), bool transpose = false) {
  for (uint i = 0; i < 2; i++) to[lk_offset(i, pitch, origin, transpose)] = P(matrix.elements[i]);
}
template <class R, class A, class B, class C>
LK_DEVICE void simdgroup_multiply_accumulate(lk_matrix<R>& result, const lk_matrix<A>& a, const lk_matrix<B>& b, const lk_matrix<C>& c) {
  lk_spot spot = lk_spot::mine();
  vec<float, 2> row(lk_float(a.elements[0]), lk_float(a.elements[1])), column(lk_float(b.elements[0]), lk_float(b.elements[1]));
  vec<float, 2> sum(lk_float(c.elements[0]), lk_float(c.elements[1]));
  _Pragma("unroll") for (uint k = 0; k < 8; k++) {
    vec<float, 2> pair = lk_from(lk_spot{spot.row, k}.lane(), row);
    sum += pair[k % 2] * lk_from(lk_spot{k, spot.column}.lane(), column);
  }
  for (int i = 0; i < 2; i++) result.elements[i] = R(sum[i]);
}
template <class R, class A, class B> LK_DEVICE void simdgroup_multiply(lk_matrix<R>& result, const lk_matrix<A>& a, const lk_matrix<B>& b) {
  simdgroup_multiply_accumulate(result, a, b, make_filled_simdgroup_matrix<R, 8, 8>(R(0.0f)));
}
}
