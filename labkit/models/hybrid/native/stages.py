"""What happens to a block of tokens between two points at which tokens, heads or experts wait for each other.

Every stage takes the addresses of three records (`records`), and which items it is to work on. `through` is all of
them in order for one thread, so that a step of few tokens is one call.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.attention import loops as attention_loops
from labkit.kernels.compiled import entry
from labkit.kernels.fused.loops import fill, rms_norm
from labkit.kernels.gated_delta.loops import TAPS, mixer_heads, tail_after
from labkit.kernels.grouped_matmul import loops as expert_loops
from labkit.kernels.quantized_matmul.loops import product, side_by_side
from labkit.kernels.quantized_matmul.panels import FIELDS, INPUTS, OUTPUTS, WIDTH
from labkit.kernels.routing import loops as routing_loops
from labkit.kernels.vectors import pointer
from labkit.kernels.views import floats, whole_numbers
from labkit.models.hybrid.native.records import CACHE, CALL, LAYER

LAYER_BYTES, CACHE_BYTES = LAYER.itemsize, CACHE.itemsize


@entry
def enter(layer, cache, call, begin, end):
    """inputs = the mixer's input matrices times norm(x), for tokens."""
    w, c = carray(pointer(layer), (1,), LAYER)[0], carray(pointer(call), (1,), CALL)[0]
    width, count = w.width, end - begin
    normed = c.normed + 4 * width * begin
    for t in range(count):
        x, to = floats(c.x + 4 * width * (begin + t), width), floats(normed + 4 * width * t, width)
        rms_norm(x, floats(w.input_norm, width), w.eps, to)
    side_by_side(normed, width, count, w.arena, w.inputs, w.parts, c.inputs + 4 * w.columns * begin, w.columns)


@entry
def delta(layer, cache, call, begin, end):
    """inputs -> mixed through Gated DeltaNet, for key heads of all rows; the states move."""
    w, c = carray(pointer(layer), (1,), LAYER)[0], carray(pointer(call), (1,), CALL)[0]
    s = carray(pointer(cache), (1,), CACHE)[0]
    mixer_heads(
        c.inputs, w.columns, s.tail, s.state, w.conv, w.a_log, w.dt_bias, w.mixer_norm, w.eps, w.key_heads,
        w.value_heads, w.key_dim, w.value_dim, c.starts, s.recorded, s.states, c.mixed, begin, end,
    )  # fmt: skip


@entry
def remember(layer, cache, call, begin, end):
    """The convolution's tails of rows, once all heads have read those before."""
    w, c = carray(pointer(layer), (1,), LAYER)[0], carray(pointer(call), (1,), CALL)[0]
    s = carray(pointer(cache), (1,), CACHE)[0]
    channels = 2 * w.key_heads * w.key_dim + w.value_heads * w.value_dim
    size, starts = 4 * (TAPS - 1) * channels, whole_numbers(c.starts, end + 1)
    for row in range(begin, end):
        x, tail = c.inputs + 4 * w.columns * starts[row], s.tail + size * row
        for t in range(s.recorded):
            tail_after(x, w.columns, tail, channels, t + 1, s.tails + size * (row * s.recorded + t))
        tail_after(x, w.columns, tail, channels, starts[row + 1] - starts[row], tail)


@entry
def store(layer, cache, call, begin, end):
    """Queries of tokens normed and rotated in place, keys and values written to their columns."""
    w, c = carray(pointer(layer), (1,), LAYER)[0], carray(pointer(call), (1,), CALL)[0]
    s = carray(pointer(cache), (1,), CACHE)[0]
    attention_loops.attention_inputs(
        c.inputs, w.columns, w.q_norm, w.k_norm, w.eps, c.cosines, c.sines, w.half, w.query_heads, w.kv_heads,
        w.head_dim, c.starts, c.row_of, s.column, s.keys, s.values, s.capacity, begin, end,
    )  # fmt: skip


@entry
def attend(layer, cache, call, begin, end):
    """inputs -> mixed through attention, for blocks of queries."""
    w, c = carray(pointer(layer), (1,), LAYER)[0], carray(pointer(call), (1,), CALL)[0]
    s = carray(pointer(cache), (1,), CACHE)[0]
    attention_loops.attention_blocks(
        c.inputs, w.columns, s.keys, s.values, s.capacity, w.query_heads, w.kv_heads, w.head_dim, w.scale, c.blocks,
        c.starts, s.first, s.column, c.mixed, begin, end,
    )  # fmt: skip


@entry
def leave(layer, cache, call, begin, end):
    """x += the mixer's output matrix times mixed, normed = norm(x), for tokens."""
    w, c = carray(pointer(layer), (1,), LAYER)[0], carray(pointer(call), (1,), CALL)[0]
    width, count, row = w.width, end - begin, whole_numbers(w.output, FIELDS)[OUTPUTS]
    update = np.empty(count * row, np.float32)
    product(c.mixed + 4 * w.mixed * begin, w.mixed, count, w.arena, w.output, 0, 0, row // WIDTH, update, row)
    for t in range(count):
        at = 4 * width * (begin + t)
        x = floats(c.x + at, width)
        for i in range(width):
            x[i] += update[t * row + i]
        rms_norm(x, floats(w.post_norm, width), w.eps, floats(c.normed + at, width))


@entry
def route(layer, cache, call, begin, end):
    """Which experts tokens take, and with which weights."""
    w, c = carray(pointer(layer), (1,), LAYER)[0], carray(pointer(call), (1,), CALL)[0]
    count, row, taken = end - begin, w.router_columns, w.top_k + w.slots
    weights = taken + w.factor
    logits = np.empty(count * row, np.float32)
    at = logits.ctypes.data
    side_by_side(c.normed + 4 * w.width * begin, w.width, count, w.arena, w.router, w.router_parts, at, row)
    for t in range(count):
        chosen = whole_numbers(c.chosen + 8 * taken * (begin + t), taken)
        factors = floats(c.factors + 4 * weights * (begin + t), weights)
        here = logits[t * row : (t + 1) * row]
        routing_loops.choose(here, w.experts, w.top_k, w.renormalise, chosen, factors)


@entry
def assign(layer, cache, call, begin, end):
    """All tokens' assignments by expert."""
    w, c = carray(pointer(layer), (1,), LAYER)[0], carray(pointer(call), (1,), CALL)[0]
    taken, number = w.top_k + w.slots, w.experts + w.slots
    total = c.tokens * taken
    blocks = whole_numbers(c.expert_blocks, 3 * (number + total // c.expert_rows))
    c.expert_count = routing_loops.group(
        whole_numbers(c.chosen, total), number, taken, whole_numbers(c.order, total), whole_numbers(c.places, total),
        c.expert_rows, blocks,
    )  # fmt: skip


@entry
def experts(layer, cache, call, begin, end):
    """normed -> products through blocks of the experts' rows."""
    w, c = carray(pointer(layer), (1,), LAYER)[0], carray(pointer(call), (1,), CALL)[0]
    expert_loops.experts(
        c.normed, w.width, w.arena, w.expert_gate, w.expert_up, w.expert_down, c.expert_blocks, c.order, c.products,
        whole_numbers(w.expert_down, FIELDS)[OUTPUTS], begin, end,
    )  # fmt: skip


@entry
def combine(layer, cache, call, begin, end):
    """x += the weighted sum of its experts' products, for tokens."""
    w, c = carray(pointer(layer), (1,), LAYER)[0], carray(pointer(call), (1,), CALL)[0]
    taken, row = w.top_k + w.slots, whole_numbers(w.expert_down, FIELDS)[OUTPUTS]
    weights = taken + w.factor
    for t in range(begin, end):
        places, factors = whole_numbers(c.places + 8 * taken * t, taken), floats(c.factors + 4 * weights * t, taken)
        expert_loops.combine(c.products, row, places, factors, floats(c.x + 4 * w.width * t, w.width))


@entry
def dense(layer, cache, call, begin, end):
    """x += the MLP that all tokens pass, times its factor if it has one, for tokens."""
    w, c = carray(pointer(layer), (1,), LAYER)[0], carray(pointer(call), (1,), CALL)[0]
    width, count, row = w.width, end - begin, whole_numbers(w.down, FIELDS)[OUTPUTS]
    hidden = np.empty(count * 2 * whole_numbers(w.gate, FIELDS)[OUTPUTS], np.float32)
    update = np.empty(count * row, np.float32)
    expert_loops.mlp(
        c.normed + 4 * width * begin, width, count, w.arena, w.gate, w.up, w.down, 0, hidden, update.ctypes.data, row
    )
    taken = w.top_k + w.slots
    for t in range(count):
        x, factor = floats(c.x + 4 * width * (begin + t), width), np.float32(1)
        if w.factor:
            factor = floats(c.factors + 4 * (taken + 1) * (begin + t), taken + 1)[taken]
        for i in range(width):
            x[i] += factor * update[t * row + i]


@entry
def through(layers, caches, call, begin, end):
    """All tokens through the layers `begin` to `end`."""
    c = carray(pointer(call), (1,), CALL)[0]
    for number in range(begin, end):
        layer, cache = layers + LAYER_BYTES * number, caches + CACHE_BYTES * number
        w = carray(pointer(layer), (1,), LAYER)[0]
        enter(layer, cache, call, 0, c.tokens)
        if w.attends:
            store(layer, cache, call, 0, c.tokens)
            attend(layer, cache, call, 0, c.block_count)
        else:
            delta(layer, cache, call, 0, c.rows * w.key_heads)
            remember(layer, cache, call, 0, c.rows)
        leave(layer, cache, call, 0, c.tokens)
        if w.experts:
            route(layer, cache, call, 0, c.tokens)
            assign(layer, cache, call, 0, 1)
            experts(layer, cache, call, 0, c.expert_count)
            combine(layer, cache, call, 0, c.tokens)
        if w.gate:
            dense(layer, cache, call, 0, c.tokens)


@entry
def score(x, norm, eps, width, chosen, states, begin, end):
    """states[i] = norm(x[chosen[i]]), zeros where that is negative (a padded column).

    Args: addresses; x, states: float32 [., width]. eps: of float32 [1]. chosen: of int64.
    """
    tokens = whole_numbers(chosen, end)
    for i in range(begin, end):
        to = floats(states + 4 * width * i, width)
        if tokens[i] >= 0:
            rms_norm(floats(x + 4 * width * tokens[i], width), floats(norm, width), floats(eps, 1)[0], to)
        else:
            fill(to, np.float32(0))


@entry
def head(states, rows, arena, matrix, logits, row, first, last):
    """logits [rows, row] of panels `first` to `last`, of states [rows, inputs of the matrix]; addresses and sizes."""
    product(states, whole_numbers(matrix, FIELDS)[INPUTS], rows, arena, matrix, 0, first, last, logits, row)
