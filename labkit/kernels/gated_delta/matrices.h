// 8 x 8 matrices spread over a simdgroup; a lane holds two neighbours of a row: row `matrix_row(lane)`, column `matrix_column(lane)` and
// the next, as MLX's own kernels rely on.

//@provides matrix_row matrix_column
METAL_FUNC int matrix_row(uint lane) { return (lane / 4 & 4) + lane / 2 % 4; }
METAL_FUNC int matrix_column(uint lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }

//@provides load_tokens
// Eight tokens as rows, eight dimensions as columns; zeros from token `valid` on.
template <typename U>
METAL_FUNC simdgroup_float8x8 load_tokens(const device U* rows, size_t stride, int valid, uint lane) {
  simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  int token = matrix_row(lane);
  if (token < valid) {
    const device U* from = rows + token * stride + matrix_column(lane);
    m.thread_elements()[0] = static_cast<float>(from[0]);
    m.thread_elements()[1] = static_cast<float>(from[1]);
  }
  return m;
}

//@provides load_tokens_across
// Eight dimensions as rows, eight tokens as columns.
template <typename U>
METAL_FUNC simdgroup_float8x8 load_tokens_across(const device U* rows, size_t stride, int valid, uint lane) {
  simdgroup_float8x8 m;
#pragma unroll
  for (int e = 0; e < 2; e++) {
    int token = matrix_column(lane) + e;
    m.thread_elements()[e] = token < valid ? static_cast<float>(rows[token * stride + matrix_row(lane)]) : 0.0f;
  }
  return m;
}
