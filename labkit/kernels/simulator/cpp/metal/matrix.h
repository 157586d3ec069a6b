// 8x8 matrices spread over a simdgroup, two elements of a row in each lane, in the layout that MLX's kernels rely on.
#pragma once
#include "simd.h"

extern "C" uint32_t lk_lane_index();

namespace metal {

struct MatrixPlace {  // where a lane's two elements lie
  uint row, column;
  static LK_INLINE MatrixPlace of_lane(uint lane) {
    uint quad = lane / 4;
    return {(quad & 4) + (lane / 2) % 4, (quad & 2) * 2 + (lane % 2) * 2};
  }
  static LK_INLINE uint lane_of(uint row, uint column) { return (row & 4) * 4 + ((column >> 2) & 1) * 8 + (row & 3) * 2 + ((column >> 1) & 1); }
};

template <class T, int Rows, int Columns> struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "simdgroup_matrix has 8 rows and 8 columns");
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  LK_INLINE explicit simdgroup_matrix(T diagonal) {
    MatrixPlace p = MatrixPlace::of_lane(lk_lane_index());
    for (uint i = 0; i < 2; i++) elements.v[i] = p.row == p.column + i ? diagonal : T(0);
  }
  LK_INLINE vec<T, 2>& thread_elements() { return elements; }
  LK_INLINE const vec<T, 2>& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int R, int C> LK_INLINE simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, R, C> m;
  m.elements = vec<T, 2>(v);
  return m;
}

template <class T, class P>
LK_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const P* p, ulong per_row = 8, ulong2 origin = ulong2(0ul), bool transpose = false) {
  MatrixPlace at = MatrixPlace::of_lane(lk_lane_index());
  for (int i = 0; i < 2; i++)
    m.elements.v[i] = T(transpose ? p[(origin.v[1] + at.column + i) * per_row + origin.v[0] + at.row]
                                  : p[(origin.v[1] + at.row) * per_row + origin.v[0] + at.column + i]);
}
template <class T, class P>
LK_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, P* p, ulong per_row = 8, ulong2 origin = ulong2(0ul), bool transpose = false) {
  MatrixPlace at = MatrixPlace::of_lane(lk_lane_index());
  for (int i = 0; i < 2; i++)
    (transpose ? p[(origin.v[1] + at.column + i) * per_row + origin.v[0] + at.row]
               : p[(origin.v[1] + at.row) * per_row + origin.v[0] + at.column + i]) = P(m.elements.v[i]);
}

// d = a b + c, summed in float over ascending k.
template <class A, class B> struct FactorElements { A a[2]; B b[2]; };
template <class D, class A, class B, class C>
LK_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b,
                                             const simdgroup_matrix<C, 8, 8>& c, LK_CALLER_LINE) {
  typedef FactorElements<A, B> Factors;
  Factors mine{{a.elements.v[0], a.elements.v[1]}, {b.elements.v[0], b.elements.v[1]}};
  lk::Exchange x = exchange(mine, lk::kMatrix, line_);
  MatrixPlace at = MatrixPlace::of_lane(x.lane);
  float sum[2] = {(float)c.elements.v[0], (float)c.elements.v[1]};
  for (uint k = 0; k < 8; k++) {
    float left = (float)value_of<Factors>(x, MatrixPlace::lane_of(at.row, k), line_).a[k & 1];
    Factors right = value_of<Factors>(x, MatrixPlace::lane_of(k, at.column), line_);
    for (int i = 0; i < 2; i++) sum[i] += left * (float)right.b[i];
  }
  for (int i = 0; i < 2; i++) d.elements.v[i] = D(sum[i]);
}
template <class D, class A, class B>
LK_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b, LK_CALLER_LINE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)), line_);
}

}  // namespace metal
