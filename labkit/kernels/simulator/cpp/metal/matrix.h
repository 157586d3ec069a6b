// Matrices of 8 x 8 that a simdgroup holds together: each lane two neighbours of a row, where Apple's GPUs have them.
#pragma once
#include "simd.h"

extern "C" uint32_t lk_lane_index();

namespace metal {

// Lanes in groups of eight fill quarters of the matrix: groups 0 and 1 the upper four rows, left and right, 2 and 3 the lower.
// Within a quarter of 4 x 4, two lanes share a row.
struct Corner {
  uint row, column;  // of the first of the lane's two elements
  static LK_INLINE Corner of(uint lane) {
    uint quarter = lane / 8, within = lane % 8;
    return {quarter / 2 * 4 + within / 2, quarter % 2 * 4 + within % 2 * 2};
  }
  // The lane that holds an element.
  static LK_INLINE uint holder(uint row, uint column) { return row / 4 * 16 + column / 4 * 8 + row % 4 * 2 + column % 4 / 2; }
};

template <class T, int Rows, int Columns> struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "simdgroup_matrix has 8 rows and 8 columns");
  vec<T, 2> pair;

  simdgroup_matrix() = default;
  LK_INLINE explicit simdgroup_matrix(T diagonal) {
    Corner at = Corner::of(lk_lane_index());
    pair = vec<T, 2>(at.row == at.column ? diagonal : T(0), at.row == at.column + 1 ? diagonal : T(0));
  }
  LK_INLINE vec<T, 2>& thread_elements() { return pair; }
  LK_INLINE const vec<T, 2>& thread_elements() const { return pair; }
};
template <class T> using matrix_8x8 = simdgroup_matrix<T, 8, 8>;
using simdgroup_float8x8 = matrix_8x8<float>;
using simdgroup_half8x8 = matrix_8x8<half>;
using simdgroup_bfloat8x8 = matrix_8x8<bfloat>;

template <class T, int Rows, int Columns> LK_INLINE simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Rows, Columns> filled;
  filled.pair = vec<T, 2>(value, value);
  return filled;
}

// Where the lane's element number `which` lies in memory, counted in elements from the matrix's corner at `origin`.
LK_INLINE ulong matrix_offset(uint which, ulong per_row, ulong2 origin, bool transposed) {
  Corner at = Corner::of(lk_lane_index());
  ulong down = at.row, across = at.column + which;
  if (transposed) {
    ulong row = down;
    down = across;
    across = row;
  }
  return (origin.v[1] + down) * per_row + origin.v[0] + across;
}
template <class T, class Source>
LK_INLINE void simdgroup_load(matrix_8x8<T>& to, const Source* from, ulong per_row = 8, ulong2 origin = ulong2(ulong(0)), bool transposed = false) {
  for (uint which = 0; which < 2; which++) to.pair.v[which] = T(from[matrix_offset(which, per_row, origin, transposed)]);
}
template <class T, class Target>
LK_INLINE void simdgroup_store(const matrix_8x8<T>& from, Target* to, ulong per_row = 8, ulong2 origin = ulong2(ulong(0)), bool transposed = false) {
  for (uint which = 0; which < 2; which++) to[matrix_offset(which, per_row, origin, transposed)] = Target(from.pair.v[which]);
}

// result = left right + start, each element a float that grows by one product after the other, in order of k.
template <class Left, class Right> struct Factors { Left left[2]; Right right[2]; };
template <class Result, class Left, class Right, class Start>
LK_INLINE void simdgroup_multiply_accumulate(matrix_8x8<Result>& result, const matrix_8x8<Left>& left, const matrix_8x8<Right>& right,
                                             const matrix_8x8<Start>& start, LK_CALLER_LINE) {
  using Pairs = Factors<Left, Right>;
  Brought<Pairs> all({{left.pair.v[0], left.pair.v[1]}, {right.pair.v[0], right.pair.v[1]}}, lk::kMatrix, line_);
  Corner mine = Corner::of(all.me());
  float first = float(start.pair.v[0]), second = float(start.pair.v[1]);
  for (uint k = 0; k < 8; k++) {
    Pairs in_my_row = all.by(Corner::holder(mine.row, k)), in_my_columns = all.by(Corner::holder(k, mine.column));
    float factor = float(in_my_row.left[k % 2]);
    first += factor * float(in_my_columns.right[0]);
    second += factor * float(in_my_columns.right[1]);
  }
  result.pair.v[0] = Result(first);
  result.pair.v[1] = Result(second);
}
template <class Result, class Left, class Right>
LK_INLINE void simdgroup_multiply(matrix_8x8<Result>& result, const matrix_8x8<Left>& left, const matrix_8x8<Right>& right, LK_CALLER_LINE) {
  matrix_8x8<Result> zero = make_filled_simdgroup_matrix<Result, 8, 8>(Result(0));
  simdgroup_multiply_accumulate(result, left, right, zero, line_);
}

}  // namespace metal
