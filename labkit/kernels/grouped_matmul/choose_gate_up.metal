// `decode_gate_up` with the choice of experts in front: each threadgroup chooses for its token from the router's scores, as far as
// its own slot. One more for each slot has no columns: slot 0's writes a token's whole choice down for `decode_down`, which takes
// longer, while the others wait for their weights.
alignas(16) threadgroup float memory[FewRows::MEMORY];
threadgroup int expert[1];
threadgroup float factor[1];
constexpr uint SLOTS = TOPK + SHARED;
uint assignment = threadgroup_position_in_grid.y, first = threadgroup_position_in_grid.x * FewRows::COLUMNS;
uint token = assignment / SLOTS, slot = assignment % SLOTS, lane = thread_index_in_simdgroup;
bool writes = first >= uint(N);
if (simdgroup_index_in_threadgroup == 0) {
  const device float* scores = logits + token * L;
  if (!writes) {
    uint chosen = slot < TOPK ? choose_best<E, false, false>(scores, scores, slot + 1, lane) : E + slot - TOPK;
    if (lane == slot) expert[0] = int(chosen), factor[0] = 1.0f;
  } else if (slot == 0) {
    Choice choice = choose_slot<E, TOPK, SHARED, false, false, RENORMALISE>(scores, scores, 1.0f, lane);
    if (lane < SLOTS) {
      indices[token * SLOTS + lane] = int(choice.expert);
      weights[token * SLOTS + lane] = choice.weight;
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

if (!writes) {
  WeightRows<S> parts[2];
  parts[0].w = gate, parts[0].scales = gate_scales, parts[0].biases = gate_biases, parts[0].first = first;
  parts[1].w = up, parts[1].scales = up_scales, parts[1].biases = up_biases, parts[1].first = first;
  gate_up_tile<FewRows, N>(parts, x + size_t(token) * K, expert, factor, hidden + size_t(assignment) * N, memory,
                           thread_position_in_threadgroup.x, lane, simdgroup_index_in_threadgroup);
}
