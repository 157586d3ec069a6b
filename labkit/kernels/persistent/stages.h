// The stages of a layer that is one launch. Between two of them all threadgroups wait for each other (`Grid`); within one each takes
// tiles, heads or experts in turns, by the functions that the plain form's kernels are made of.

//@provides norm_rows
// Each threadgroup normalises the M rows x + residual for itself, into a copy `mine` of its own: cheaper than to wait for another to do
// it. The sums go to `sums` if `first`. `partial` holds 64 floats.
template <class T, int D, int M, int THREADS>
METAL_FUNC void norm_rows(const device T* x, const device T* residual, const device T* weight, float eps, bool first, device T* sums,
                          device T* mine, threadgroup float* partial, uint t, uint lane, uint simdgroup) {
  for (uint m = 0; m < M; m++) {
    AddedRow<T, D, THREADS> row;
    row.load(x + m * D, residual + m * D, weight, t);
    float sum = threadgroup_sum<THREADS>(row.add(sums + m * D, first, t), partial + m % 2 * 32, lane, simdgroup);
    float scale = metal::precise::rsqrt(sum / D + eps);
    for (int i = 0; i < AddedRow<T, D, THREADS>::VALUES; i++) {
      uint d = t + i * THREADS;
      if (d < D) mine[m * D + d] = row.normed(i, scale);
    }
  }
  threadgroup_barrier(mem_flags::mem_device);
}

//@provides project_rows
// y = x W^T for M rows, tile by tile; `prefetched` tiles of this threadgroup are already on their way.
template <class FewRows, int M, int BITS, int GROUP, int K, int N, int SIMDS, class T, class S>
METAL_FUNC void project_rows(thread const Grid& grid, WeightRows<S> tile, const device T* x, device T* y, threadgroup float* memory) {
  for (uint first = grid.group * 16; first < uint(N); first += grid.groups * 16) {
    tile.first = first + grid.groups * 16;
    prefetch_rows<BITS, GROUP, K, N>(tile, 0, grid.thread_);
    few_rows_tile<FewRows, M, N, 1, SIMDS>(tile.w, tile.scales, tile.biases, x, first, y, memory, grid.thread_, grid.lane,
                                           grid.simdgroup);
    reuse();
  }
}

//@provides SparseWeights SparseHalf
template <class T, class S, class R> struct SparseWeights {
  const device T* norm;
  const device uint* router;
  const device R* router_scales;
  const device R* router_biases;
  WeightRows<S> parts[2], down;  // gate and up
};

// From the mixer's output to the end of the layer: residual and norm with the router's scores; the choice, which each threadgroup makes
// for itself; gate and up of the chosen and of the shared expert; down and their sum. M rows, two grid-wide barriers.
template <class T, class S, class R, class GateUp, class Down, int M, int D, int E, int TOPK, int SHARED, bool RENORMALISE, int SCORES,
          int ROUTER_BITS, int ROUTER_GROUP, int I, int BITS, int GROUP, int DOWN_BITS, int DOWN_GROUP, int SIMDS>
struct SparseHalf {
  static constexpr constant int SLOTS = TOPK + SHARED, CHOICES = M * SLOTS;
  static constexpr constant int MEMORY = larger(RouterRow<D, ROUTER_BITS, ROUTER_GROUP>::MEMORY, larger(GateUp::MEMORY, Down::MEMORY));
  static constexpr constant uint BLOCKS = (SCORES + SIMDS - 1) / SIMDS;  // of experts whose scores a threadgroup makes
  static constexpr constant uint INNER_TILES = (I + 15) / 16, TILES = (D + 15) / 16;

  // Send for what the scores read, and for the shared expert's rows: nothing else is known yet.
  static METAL_FUNC void send(thread const Grid& grid, SparseWeights<T, S, R> weights) {
    constexpr uint ROW = uint(D) * ROUTER_BITS / 32, FACTORS = D / ROUTER_GROUP;
    uint first = grid.group % BLOCKS * SIMDS, rows = min(uint(SIMDS), uint(SCORES) - first);
    if (grid.group < M * BLOCKS && grid.thread_ == 96) prefetch(weights.router + first * ROW, rows * ROW * 4);
    for (uint task = grid.group; SHARED > 0 && task < CHOICES * INNER_TILES; task += grid.groups) {
      uint slot = task / INNER_TILES % SLOTS;
      if (slot < TOPK) continue;
      for (int p = 0; p < 2; p++) {
        weights.parts[p].first = task % INNER_TILES * 16;
        prefetch_rows<BITS, GROUP, D, I>(weights.parts[p], E + slot - TOPK, grid.thread_);
      }
    }
  }

  // Send for gate's and up's rows of task number `task`, or for down's of all experts of a token.
  static METAL_FUNC void send_inner(thread const Grid& grid, SparseWeights<T, S, R> weights, threadgroup const int* expert, uint task) {
    for (int p = 0; p < 2 && task < CHOICES * INNER_TILES; p++) {
      weights.parts[p].first = task % INNER_TILES * 16;
      prefetch_rows<BITS, GROUP, D, I>(weights.parts[p], expert[task / INNER_TILES], grid.thread_);
    }
  }
  static METAL_FUNC void send_down(thread const Grid& grid, SparseWeights<T, S, R> weights, threadgroup const int* expert, uint task) {
    weights.down.first = task % TILES * 16;
    for (uint slot = 0; slot < SLOTS && task < M * TILES; slot++) {
      prefetch_rows<DOWN_BITS, DOWN_GROUP, I, D>(weights.down, expert[task / TILES * SLOTS + slot], grid.thread_);
    }
  }

  // All threads call. `memory` holds MEMORY floats, aligned to 16 bytes, `partial` 32, `expert` CHOICES and `factor` one more.
  static METAL_FUNC void run(thread Grid& grid, SparseWeights<T, S, R> weights, const device T* update, const device T* stream, float eps,
                             device T* hidden, device T* normed, device float* logits, device T* inner, device T* y,
                             threadgroup float* memory, threadgroup float* partial, threadgroup int* expert, threadgroup float* factor) {
    for (uint task = grid.group; task < M * BLOCKS; task += grid.groups) {
      uint m = task / BLOCKS, block = task % BLOCKS;
      norm_and_score<T, D, ROUTER_BITS, ROUTER_GROUP, 32 * SIMDS>(
          update + m * D, stream + m * D, weights.norm, weights.router, weights.router_scales, weights.router_biases, eps,
          block * SIMDS, uint(SCORES), block == 0, hidden + m * D, normed + m * D, logits + m * SCORES, memory, partial, grid.thread_,
          grid.lane, grid.simdgroup);
    }
    grid.sync();

    for (uint m = grid.simdgroup; m < M; m += SIMDS) {
      const device float* scores = logits + m * SCORES;
      Choice choice = choose_slot<E, TOPK, SHARED, false, false, RENORMALISE>(scores, scores, 1.0f, grid.lane);
      if (grid.lane < uint(SLOTS)) expert[m * SLOTS + grid.lane] = int(choice.expert), factor[m * SLOTS + grid.lane] = choice.weight;
    }
    if (grid.thread_ == 0) factor[CHOICES] = 1.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);

    send_inner(grid, weights, expert, grid.group);
    send_down(grid, weights, expert, grid.group);
    for (uint task = grid.group; task < CHOICES * INNER_TILES; task += grid.groups) {
      send_inner(grid, weights, expert, task + grid.groups);
      uint assignment = task / INNER_TILES;
      for (int p = 0; p < 2; p++) weights.parts[p].first = task % INNER_TILES * 16;
      gate_up_tile<GateUp, I>(weights.parts, normed + assignment / SLOTS * D, expert + assignment, factor + CHOICES,
                              inner + assignment * I, memory, grid.thread_, grid.lane, grid.simdgroup);
      reuse();
    }
    grid.sync();

    for (uint task = grid.group; task < M * TILES; task += grid.groups) {
      uint m = task / TILES, first = task % TILES * 16, column = first + grid.thread_;
      send_down(grid, weights, expert, task + grid.groups);
      weights.down.first = first;
      Down::run(&weights.down, inner + m * SLOTS * I, I, expert + m * SLOTS, factor + m * SLOTS, memory, grid.lane, grid.simdgroup);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (grid.thread_ < 16 && column < uint(D)) y[m * D + column] = static_cast<T>(Down::at(memory, 0, grid.thread_, 0));
      reuse();
    }
  }
};
