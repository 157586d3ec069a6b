"""What happens to a block of tokens between two points at which tokens, heads or experts wait for each other.

Every stage takes the addresses of three records (`records`), and which items it is to work on. `rows` is all of them in
order for one thread, and the head, so that a step of few tokens is one call.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.attention import loops as attention_loops
from labkit.kernels.attention.loops import BEGIN, BLOCK_FIELDS, COUNT, HEAD, QUERIES, ROW
from labkit.kernels.compiled import entry
from labkit.kernels.fused.loops import fill, rms_norm
from labkit.kernels.gated_delta.loops import TAPS, mixer_heads, tail_after
from labkit.kernels.grouped_matmul import loops as expert_loops
from labkit.kernels.quantized_matmul.loops import product, side_by_side
from labkit.kernels.quantized_matmul.panels import FIELDS, INPUTS, OUTPUTS, WIDTH
from labkit.kernels.routing import loops as routing_loops
from labkit.kernels.vectors import pointer
from labkit.kernels.views import floats, whole_numbers
from labkit.models.hybrid.native.records import CACHE, CALL, FORWARD, LAYER, MODEL

LAYER_BYTES, CACHE_BYTES = LAYER.itemsize, CACHE.itemsize
CACHE_FIELDS, CALL_FIELDS = CACHE_BYTES // 8, CALL.itemsize // 8


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


@entry
def room_for(model, forward, begin, end, expert_rows, sizes):
    """How many floats and whole numbers `lay_out` needs for the rows `begin` to `end` -> int64 [2] at `sizes`."""
    m, f = carray(pointer(model), (1,), MODEL)[0], carray(pointer(forward), (1,), FORWARD)[0]
    starts, result = whole_numbers(f.starts, end + 1), whole_numbers(sizes, 2)
    tokens, count = starts[end] - starts[begin], end - begin
    blocks = m.kv_heads * (count + tokens // QUERIES)
    result[0] = tokens * (m.width + m.inputs + m.mixed + m.taken + 1 + m.taken * m.product)
    result[1] = tokens * (3 * m.taken + 1) + 3 * (m.experts + tokens * m.taken // expert_rows)
    result[1] += count + 1 + BLOCK_FIELDS * blocks


@entry
def lay_out(model, forward, begin, end, expert_rows, memory, numbers, call):
    """CALL for the rows `begin` to `end`, its room in `memory` and `numbers`, experts' blocks of `expert_rows`."""
    m, f = carray(pointer(model), (1,), MODEL)[0], carray(pointer(forward), (1,), FORWARD)[0]
    c, starts = carray(pointer(call), (1,), CALL)[0], whole_numbers(f.starts, end + 1)
    first, tokens = starts[begin], starts[end] - starts[begin]
    c.tokens, c.rows, c.expert_rows = tokens, end - begin, expert_rows
    c.x = f.x + 4 * m.width * first
    c.cosines, c.sines = f.cosines + 4 * m.half * first, f.sines + 4 * m.half * first
    c.normed = memory
    c.inputs = c.normed + 4 * tokens * m.width
    c.mixed = c.inputs + 4 * tokens * m.inputs
    c.factors = c.mixed + 4 * tokens * m.mixed
    c.products = c.factors + 4 * tokens * (m.taken + 1)
    c.chosen = numbers
    c.order = c.chosen + 8 * tokens * m.taken
    c.places = c.order + 8 * tokens * m.taken
    c.expert_blocks = c.places + 8 * tokens * m.taken
    c.starts = c.expert_blocks + 24 * (m.experts + tokens * m.taken // expert_rows)
    c.row_of = c.starts + 8 * (c.rows + 1)
    c.blocks = c.row_of + 8 * tokens
    own, row_of = whole_numbers(c.starts, c.rows + 1), whole_numbers(c.row_of, tokens)
    count = 0
    for row in range(c.rows + 1):
        own[row] = starts[begin + row] - first
    for row in range(c.rows):
        count += m.kv_heads * ((own[row + 1] - own[row] + QUERIES - 1) // QUERIES)
        for t in range(own[row], own[row + 1]):
            row_of[t] = row
    c.block_count = count
    for row in range(c.rows):
        for at in range(own[row], own[row + 1], QUERIES):
            for key_head in range(m.kv_heads):
                count -= 1  # the last of a row come first: they see the most keys
                block = whole_numbers(c.blocks + 8 * BLOCK_FIELDS * count, BLOCK_FIELDS)
                block[ROW], block[HEAD], block[BEGIN], block[COUNT] = row, key_head, at, min(QUERIES, own[row + 1] - at)


@entry
def rows_within(model, forward, begin, end, together, memory, numbers, call):
    """`rows`, with the room that it needs: an entry of its own, so that this lives as long as it is used."""
    m, f = carray(pointer(model), (1,), MODEL)[0], carray(pointer(forward), (1,), FORWARD)[0]
    lay_out(model, forward, begin, end, together, memory, numbers, call)
    size = m.count * CACHE_FIELDS
    at, row, caches = whole_numbers(f.caches, size), whole_numbers(f.cache_rows, size), np.empty(size, np.int64)
    for i in range(size):
        caches[i] = at[i] + begin * row[i]
    through(m.layers, caches, call, 0, m.count)
    count, first = (end - begin) * f.each, whole_numbers(f.starts, end + 1)[begin]
    asked, chosen = whole_numbers(f.chosen + 8 * f.each * begin, count), np.empty(count, np.int64)
    for i in range(count):
        chosen[i] = max(asked[i] - first, -1)
    states = np.empty(count * m.width, np.float32)
    x = carray(pointer(call), (1,), CALL)[0].x
    score(x, m.norm, m.eps, m.width, chosen, states, 0, count)
    to = f.logits + 4 * m.outputs * f.each * begin
    head(states, count, m.arena, m.matrix, to, m.outputs, 0, m.outputs // WIDTH)


@entry
def rows(model, forward, begin, end):
    """The rows `begin` to `end` from the residual stream to their logits, by one thread."""
    f, sizes = carray(pointer(forward), (1,), FORWARD)[0], np.empty(2, np.int64)
    starts = whole_numbers(f.starts, end + 1)
    together = max(starts[end] - starts[begin], 1)
    room_for(model, forward, begin, end, together, sizes)
    memory, numbers = np.empty(sizes[0], np.float32), np.empty(sizes[1], np.int64)
    rows_within(model, forward, begin, end, together, memory, numbers, np.zeros(CALL_FIELDS, np.int64))
