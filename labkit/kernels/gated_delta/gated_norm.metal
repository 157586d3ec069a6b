// One simdgroup a head and token.
constexpr int N = DV / 32;
int lane = thread_index_in_simdgroup;
size_t at = (size_t(threadgroup_position_in_grid.x) * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup) * DV;
float x[N], gate[N], scale[N];
load_row<N>(y + at, lane, x);
load_row<N>(z + at, lane, gate);
load_row<N>(weight, lane, scale);
gated_rms_row<N>(x, gate, scale, eps);
store_row<N>(out + at, lane, x);
