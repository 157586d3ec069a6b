"""One token of the delta rule on two rows of the state, eight floats at a time."""

from __future__ import annotations

from numba.core import types
from numba.extending import intrinsic

from labkit.kernels.vectors import FLOAT, FLOATS, LANES, Emitter

ROWS = 2
"""Rows of the state in one turn: two chains of sums for each keep both multipliers busy."""


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
        _write(Emitter(builder), *args)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def look(context, state, key, seen, dk):
    """seen = state key, for `ROWS` rows: what `turn` finds under its next key, in the same order of additions."""
    signature = types.void(*[types.intp] * 4)

    def generate(context, builder, signature, args):
        e, (state, key, seen, dk) = Emitter(builder), args
        sums = [e.register(e.zero()) for _ in range(ROWS)]
        with e.loop(builder.udiv(dk, e.long(LANES))) as step:
            k = e.load(e.at(key, (step, 4 * LANES)), FLOATS)
            for row, total in enumerate(sums):
                s = e.load(e.at(state, (builder.mul(dk, e.long(row)), 4), (step, 4 * LANES)), FLOATS)
                total.set(e.fma(s, k, total.get()))
        for row, total in enumerate(sums):
            e.store(e.total(total.get()), e.at(seen, (row, 4)))
        return context.get_dummy_value()

    return signature, generate


def _write(e: Emitter, state, key, query, next_key, decay, change, seen, out, dk) -> None:
    rows = range(ROWS)
    decays = e.spread(decay)
    changes = [e.spread(e.load(e.at(change, (row, 4)), FLOAT)) for row in rows]
    sums = {(row, what): e.register(e.zero()) for row in rows for what in ("seen", "out")}
    with e.loop(e.builder.udiv(dk, e.long(LANES))) as step:
        k, q, n = (e.load(e.at(start, (step, 4 * LANES)), FLOATS) for start in (key, query, next_key))
        for row in rows:
            place = e.at(state, (e.builder.mul(dk, e.long(row)), 4), (step, 4 * LANES))
            s = e.fma(changes[row], k, e.builder.fmul(decays, e.load(place, FLOATS)))
            e.store(s, place)
            for what, factor in (("out", q), ("seen", n)):
                sums[row, what].set(e.fma(s, factor, sums[row, what].get()))
    for row in rows:
        e.store(e.total(sums[row, "seen"].get()), e.at(seen, (row, 4)))
        e.store(e.total(sums[row, "out"].get()), e.at(out, (row, 4)))
