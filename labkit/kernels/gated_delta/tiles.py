"""One token of the delta rule on a few rows of the state, eight floats at a time."""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from labkit.kernels.vectors import FLOAT, FLOATS, LANES, Emitter

ROWS = 2
"""Rows of the state in one turn: two chains of sums for each keep both multipliers busy."""

LAST_ROWS = 4
"""Rows in the turn of a last token, which has one chain of sums for each."""

AHEAD = 8
"""Rows of the state that are asked for before they are read, where each is read for one token alone."""


@intrinsic
def turn(context, state, key, query, next_key, decay, change, seen, out, dk):
    """state = decay state + change key^T; out = state query; seen = state next_key, for `ROWS` rows.

    Args:
        state, key, query, next_key: addresses of [ROWS, dk] and of [dk].
        decay: float32. change, seen, out: addresses of [ROWS].
        dk: a multiple of eight.
    """
    signature = types.void(*[types.intp] * 4, types.float32, *[types.intp] * 4)

    def generate(context, builder, signature, args):
        state, key, query, next_key, decay, change, seen, out, dk = args
        _turn(Emitter(builder), ROWS, state, key, [(query, out), (next_key, seen)], decay, change, dk)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def last_turn(context, state, key, query, decay, change, out, dk):
    """`turn` for `LAST_ROWS` rows where no token follows: the same results from the same additions."""
    signature = types.void(*[types.intp] * 3, types.float32, *[types.intp] * 3)

    def generate(context, builder, signature, args):
        state, key, query, decay, change, out, dk = args
        _turn(Emitter(builder), LAST_ROWS, state, key, [(query, out)], decay, change, dk)
        return context.get_dummy_value()

    return signature, generate


@intrinsic(prefer_literal=True)
def look(context, rows, ahead, state, key, seen, dk):
    """seen = state key: what `turn` finds under its next key, in the same order of additions.

    Args:
        rows, ahead: literal: how many; and how far before its reading a row is asked for, 0 for not at all.
    """
    count, before = rows.literal_value, ahead.literal_value
    signature = types.void(rows, ahead, *[types.intp] * 4)

    def generate(context, builder, signature, args):
        e, (state, key, seen, dk) = Emitter(builder), args[2:]
        sums = [e.register(e.zero()) for _ in range(count)]
        with e.loop(builder.udiv(dk, e.long(LANES))) as step:
            k = e.load(e.at(key, (step, 4 * LANES)), FLOATS)
            for row, total in enumerate(sums):
                place = _place(e, state, row, step, dk)
                if before:
                    e.prefetch(e.at(place, (builder.mul(dk, e.long(before)), 4)))
                total.set(e.fma(e.load(place, FLOATS), k, total.get()))
        for row, total in enumerate(sums):
            e.store(e.total(total.get()), e.at(seen, (row, 4)))
        return context.get_dummy_value()

    return signature, generate


def _turn(e: Emitter, count, state, key, products, decay, change, dk) -> None:
    """state = decay state + change key^T for `count` rows; for each (x, y) of `products`, y = state x."""
    decays = e.spread(decay)
    changes = [e.spread(e.load(e.at(change, (row, 4)), FLOAT)) for row in range(count)]
    sums = {(row, y): e.register(e.zero()) for row in range(count) for _, y in products}
    with e.loop(e.builder.udiv(dk, e.long(LANES))) as step:
        k, *xs = (e.load(e.at(start, (step, 4 * LANES)), FLOATS) for start in (key, *(x for x, _ in products)))
        for row in range(count):
            place = _place(e, state, row, step, dk)
            s = e.fma(changes[row], k, e.builder.fmul(decays, e.load(place, FLOATS)))
            e.store(s, place)
            for x, (_, y) in zip(xs, products, strict=True):
                sums[row, y].set(e.fma(s, x, sums[row, y].get()))
    for (row, y), total in sums.items():
        e.store(e.total(total.get()), e.at(y, (row, 4)))


def _place(e: Emitter, state: ir.Value, row: int, step: ir.Value, dk: ir.Value) -> ir.Value:
    """Of eight floats of a row."""
    return e.at(state, (e.builder.mul(dk, e.long(row)), 4), (step, 4 * LANES))
