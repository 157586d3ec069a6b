"""What happens to a block of tokens between two points at which tokens, heads or experts wait for each other."""

from __future__ import annotations

import numpy as np

from labkit.kernels.compiled import inner, loop
from labkit.kernels.fused.loops import fill, rms_norm, swiglu
from labkit.kernels.grouped_matmul.loops import combine
from labkit.kernels.grouped_matmul.loops import experts as expert_blocks
from labkit.kernels.quantized_matmul.loops import product, side_by_side
from labkit.kernels.quantized_matmul.panels import INPUTS, OUTPUTS, WIDTH
from labkit.kernels.routing.loops import choose, group


@loop
def enter(x, norm, eps, arena, matrices, inputs, begin, end):
    """inputs = matrices norm(x) for tokens `begin` to `end`. x: [T, D]. inputs: [T, columns]."""
    count, width = end - begin, x.shape[1]
    normed = np.empty((count, width), np.float32)
    for t in range(count):
        rms_norm(x[begin + t], norm, eps, normed[t])
    side_by_side(normed, width, count, arena, matrices, inputs[begin:], inputs.shape[1])


@loop
def leave(mixed, arena, output, x, norm, eps, normed, begin, end):
    """x += output mixed, normed = norm(x). mixed: [T, the mixer's width]. x, normed: [T, D]."""
    count, width, columns = end - begin, x.shape[1], output[OUTPUTS]
    update = np.empty((count, columns), np.float32)
    _whole(mixed[begin:], mixed.shape[1], count, arena, output, update, columns)
    for t in range(count):
        for i in range(width):
            x[begin + t, i] += update[t, i]
        rms_norm(x[begin + t], norm, eps, normed[begin + t])


@loop
def route(normed, arena, router, experts, top_k, renormalise, chosen, weights, begin, end):
    """Which experts tokens take, and with which weights: see `choose`. normed: [T, D]. chosen, weights: [T, ...]."""
    count, columns = end - begin, 0
    for i in range(router.shape[0]):
        columns += router[i, OUTPUTS]
    logits = np.empty((count, columns), np.float32)
    side_by_side(normed[begin:], normed.shape[1], count, arena, router, logits, columns)
    for t in range(count):
        choose(logits[t], experts, top_k, renormalise, chosen[begin + t], weights[begin + t])


@loop
def sparse(normed, arena, router, gate, up, down, slots, experts, top_k, renormalise, factors, x):
    """All of a sparse MLP for few tokens, in one call: routing, experts, sums. factors: float32 [T, weights]."""
    tokens = x.shape[0]
    chosen, places = np.empty((tokens, top_k + slots), np.int32), np.empty((tokens, top_k + slots), np.int32)
    order, blocks = np.empty(chosen.size, np.int32), np.empty((chosen.size, 3), np.int64)
    products = np.empty((chosen.size, down[OUTPUTS]), np.float32)
    route(normed, arena, router, experts, top_k, renormalise, chosen, factors, 0, tokens)
    count = group(chosen, experts + slots, order, places, tokens, blocks)
    expert_blocks(normed, arena, gate, up, down, blocks, order, products, 0, count)
    combine(products, places, factors, x, 0, tokens)


@loop
def dense(normed, arena, gate, up, down, weights, column, x, begin, end):
    """x += down(silu(gate normed) up normed), times weights[t, column] where `column` is not negative."""
    count, width, columns = end - begin, gate[OUTPUTS], down[OUTPUTS]
    hidden, update = np.empty((count, 2 * width), np.float32), np.empty((count, columns), np.float32)
    _whole(normed[begin:], normed.shape[1], count, arena, gate, hidden, 2 * width)
    _whole(normed[begin:], normed.shape[1], count, arena, up, hidden[:, width:], 2 * width)
    for t in range(count):
        swiglu(hidden[t, :width], hidden[t, width:])
    _whole(hidden, 2 * width, count, arena, down, update, columns)
    for t in range(count):
        factor = weights[begin + t, column] if column >= 0 else np.float32(1)
        for i in range(x.shape[1]):
            x[begin + t, i] += factor * update[t, i]


@loop
def score(x, norm, eps, chosen, states, begin, end):
    """states[i] = norm(x[chosen[i]]), zeros where that is negative (a padded column)."""
    for i in range(begin, end):
        if chosen[i] >= 0:
            rms_norm(x[chosen[i]], norm, eps, states[i])
        else:
            fill(states[i], np.float32(0))


@loop
def head(states, arena, matrix, logits, first, last):
    """logits [n, V padded] of panels `first` to `last`. states: [n, D]."""
    product(states, matrix[INPUTS], states.shape[0], arena, matrix, 0, first, last, logits, logits.shape[1])


@inner
def _whole(x, x_row, rows, arena, matrix, y, y_row):
    panels = matrix[OUTPUTS] // WIDTH
    product(x, x_row, rows, arena, matrix, 0, 0, panels, y, y_row)
