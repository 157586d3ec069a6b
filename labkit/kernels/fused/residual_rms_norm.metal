// One threadgroup a row (unless ADDS the residual alone): it stays in registers between the sum of squares and the scaling, VALUES
// of it in each thread.
// Everything is read before anything is written: behind a write that might be to what it reads, a read waits for its turn.
threadgroup float partial[32];
uint t = thread_position_in_threadgroup.x;
size_t row = size_t(threadgroup_position_in_grid.x) * D;

float h[VALUES], scales[VALUES];
#pragma unroll
for (int i = 0; i < VALUES; i++) {
  int d = t + i * THREADS;
  h[i] = d >= D ? 0.0f
         : ADDS ? static_cast<float>(x[row + d]) + static_cast<float>(residual[row + d])
                : static_cast<float>(residual[row + d]);
  scales[i] = d < D ? static_cast<float>(weight[d]) : 0.0f;
}
float sum = 0.0f;
for (int i = 0; i < VALUES; i++) {
  int d = t + i * THREADS;
  // Rounded before it is squared, as a separate add would leave it: R is the residual stream's type.
  R rounded = static_cast<R>(h[i]);
  if (d < D) hidden[row + d] = rounded;
  h[i] = static_cast<float>(rounded);
  sum += h[i] * h[i];
}
sum = threadgroup_sum<THREADS>(sum, partial, thread_index_in_simdgroup, simdgroup_index_in_threadgroup);
float scale = metal::precise::rsqrt(sum / D + eps);
for (int i = 0; i < VALUES; i++) {
  int d = t + i * THREADS;
  if (d < D) {
    normed[row + d] = static_cast<T>(h[i] * scale * scales[i]);
  }
}
