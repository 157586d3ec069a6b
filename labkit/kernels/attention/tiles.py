"""Attention's two inner products on a CPU, keys and values as they lie in a cache: [T, D], a token a row."""

from __future__ import annotations

from numba.core import types
from numba.extending import intrinsic

from labkit.kernels.vectors import FLOAT, FLOATS, LANES, Emitter

COLUMNS = 16
"""Values of a head that `weigh` takes at a time."""


@intrinsic(prefer_literal=True)
def dots(context, rows, keys, query, query_row, key, key_row, width, out, out_row):
    """out[rows, keys] = query key^T: eight partial sums each, over width / 8 steps.

    Args:
        rows, keys: literal. width: a multiple of eight.
        query, key, out: addresses; `_row` the floats from row to row.
    """
    m, n = rows.literal_value, keys.literal_value
    signature = types.void(rows, keys, *[types.intp] * 7)

    def generate(context, builder, signature, args):
        _dots(Emitter(builder), m, n, *args[2:])
        return context.get_dummy_value()

    return signature, generate


def _dots(e: Emitter, m: int, n: int, query, query_row, key, key_row, width, out, out_row) -> None:
    places = [(row, column) for row in range(m) for column in range(n)]
    sums = {place: e.register(e.zero()) for place in places}
    rows = [e.at(query, (row, e.builder.mul(query_row, e.long(4)))) for row in range(m)]
    columns = [e.at(key, (column, e.builder.mul(key_row, e.long(4)))) for column in range(n)]
    with e.loop(e.builder.udiv(width, e.long(LANES))) as step:
        ks = [e.load(e.at(start, (step, 4 * LANES)), FLOATS) for start in columns]
        for row, start in enumerate(rows):
            q = e.load(e.at(start, (step, 4 * LANES)), FLOATS)
            for column, k in enumerate(ks):
                sums[row, column].set(e.fma(q, k, sums[row, column].get()))
    for row, column in places:
        place = e.at(out, (row, e.builder.mul(out_row, e.long(4))), (column, 4))
        e.store(e.total(sums[row, column].get()), place)


@intrinsic(prefer_literal=True)
def weigh(context, rows, weights, faded, value, value_row, count, out, out_row):
    """out[rows, 16] = faded[rows] out + weights^T value.

    Args:
        rows: literal. weights: address of [count, rows]. faded: of [rows].
        value, out: addresses of [count, 16] and [rows, 16]; `_row` the floats from row to row.
    """
    m = rows.literal_value
    signature = types.void(rows, *[types.intp] * 7)

    def generate(context, builder, signature, args):
        _weigh(Emitter(builder), m, *args[1:])
        return context.get_dummy_value()

    return signature, generate


def _weigh(e: Emitter, m: int, weights, faded, value, value_row, count, out, out_row) -> None:
    halves = range(COLUMNS // LANES)
    starts = [e.at(out, (row, e.builder.mul(out_row, e.long(4)))) for row in range(m)]
    sums = {}
    for row, start in enumerate(starts):
        kept = e.spread(e.load(e.at(faded, (row, 4)), FLOAT))
        for half in halves:
            before = e.load(e.at(start, (half, 4 * LANES)), FLOATS)
            sums[row, half] = e.register(e.builder.fmul(kept, before))
    with e.loop(count) as step:
        here = e.at(value, (step, e.builder.mul(value_row, e.long(4))))
        v = [e.load(e.at(here, (half, 4 * LANES)), FLOATS) for half in halves]
        for row in range(m):
            w = e.spread(e.load(e.at(weights, (step, 4 * m), (row, 4)), FLOAT))
            for half in halves:
                sums[row, half].set(e.fma(w, v[half], sums[row, half].get()))
    for (row, half), register in sums.items():
        e.store(register.get(), e.at(starts[row], (half, 4 * LANES)))
