"""Attention's two inner products on a CPU, keys and values as they lie in a cache: [T, D], a token a row."""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from labkit.kernels.vectors import FLOAT, FLOATS, LANES, WORD, Emitter

AHEAD = 8
"""Rows of a cache that are asked for before they are read: one is too short for the processor to see what follows."""


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
    ahead = e.builder.mul(key_row, e.long(4 * AHEAD))
    with e.loop(e.builder.udiv(width, e.long(LANES))) as step:
        read = [e.at(start, (step, 4 * LANES)) for start in columns]
        for place in read:
            e.prefetch(e.at(place, (ahead, 1)))
        ks = [e.load(place, FLOATS) for place in read]
        for row, start in enumerate(rows):
            q = e.load(e.at(start, (step, 4 * LANES)), FLOATS)
            for column, k in enumerate(ks):
                sums[row, column].set(e.fma(q, k, sums[row, column].get()))
    every = [sums[place].get() for place in places]
    if len(every) == LANES:
        together = e.totals(every)
        totals = [e.builder.extract_element(together, ir.Constant(WORD, lane)) for lane in range(LANES)]
    else:
        totals = [e.total(one) for one in every]
    for (row, column), total in zip(places, totals, strict=True):
        e.store(total, e.at(out, (row, e.builder.mul(out_row, e.long(4))), (column, 4)))


@intrinsic(prefer_literal=True)
def weigh(context, rows, keys, weights, value, value_row, width, out, out_row):
    """out[rows, width] += weights^T value, the keys added in their order.

    Whole rows of values pass from front to back, as memory likes it, while the results stay in the first-level cache.

    Args:
        rows, keys: literal. width: a multiple of eight.
        weights: address of [keys, rows].
        value, out: addresses of [keys, width] and [rows, width]; `_row` the floats from row to row.
    """
    m, n = rows.literal_value, keys.literal_value
    signature = types.void(rows, keys, *[types.intp] * 6)

    def generate(context, builder, signature, args):
        _weigh(Emitter(builder), m, n, *args[2:])
        return context.get_dummy_value()

    return signature, generate


def _weigh(e: Emitter, m: int, n: int, weights, value, value_row, width, out, out_row) -> None:
    values = [e.at(value, (key, e.builder.mul(value_row, e.long(4)))) for key in range(n)]
    results = [e.at(out, (row, e.builder.mul(out_row, e.long(4)))) for row in range(m)]
    ahead = e.builder.mul(value_row, e.long(4 * AHEAD))
    # Read once: LLVM cannot know that the results do not lie over them.
    factors = {
        (row, key): e.spread(e.load(e.at(weights, (key, 4 * m), (row, 4)), FLOAT))
        for row in range(m)
        for key in range(n)
    }
    with e.loop(e.builder.udiv(width, e.long(LANES))) as step:
        read = [e.at(start, (step, 4 * LANES)) for start in values]
        for place in read:
            e.prefetch(e.at(place, (ahead, 1)))
        vs = [e.load(place, FLOATS) for place in read]
        for row, start in enumerate(results):
            place = e.at(start, (step, 4 * LANES))
            total = e.load(place, FLOATS)
            for key, v in enumerate(vs):
                total = e.fma(factors[row, key], v, total)
            e.store(total, place)


@intrinsic(prefer_literal=True)
def weigh_all(context, rows, weights, value, value_row, keys, width, out, out_row):
    """`weigh` for any number of keys, bit for bit: eight lanes of each result stay in a register through all of them.

    Each line of values is read twice, far apart: they should lie in a cache already.
    """
    m = rows.literal_value
    signature = types.void(rows, *[types.intp] * 7)

    def generate(context, builder, signature, args):
        _weigh_all(Emitter(builder), m, *args[1:])
        return context.get_dummy_value()

    return signature, generate


def _weigh_all(e: Emitter, m: int, weights, value, value_row, keys, width, out, out_row) -> None:
    with e.loop(e.builder.udiv(width, e.long(LANES))) as step:
        places = [e.at(out, (row, e.builder.mul(out_row, e.long(4))), (step, 4 * LANES)) for row in range(m)]
        totals = [e.register(e.load(place, FLOATS)) for place in places]
        with e.loop(keys) as key:
            v = e.load(e.at(value, (key, e.builder.mul(value_row, e.long(4))), (step, 4 * LANES)), FLOATS)
            for row, total in enumerate(totals):
                factor = e.spread(e.load(e.at(weights, (key, 4 * m), (row, 4)), FLOAT))
                total.set(e.fma(factor, v, total.get()))
        for place, total in zip(places, totals, strict=True):
            e.store(total.get(), place)
