"""The inner product of every matrix on a CPU: a few rows times panels of sixteen outputs, weights as they lie.

Lanes are outputs, so that each output is one chain of additions over k in order (by group: its integers meet x first,
then scale and bias), whatever the number of rows in the tile: a row's result cannot depend on its neighbours.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from labkit.kernels.quantized_matmul.panels import FORMS, WIDTH, Form
from labkit.kernels.vectors import FLOAT, FLOATS, LANES, Emitter

_HALVES = WIDTH // LANES

WORD = 32
"""Bits of a word of MLX's packed weights."""

AHEAD_BYTES = 4096
"""How far before its reading a packed weight is asked for: MLX's rows follow each other, and are short."""

AHEAD = 4
"""Rows up to which a tile asks for the weights of the next one: more use each weight too often to wait for it."""


@intrinsic(prefer_literal=True)
def tile(context, rows, panels, form, x, sums, weights, panel, groups, group, y, y_row):
    """y[rows, 16 panels] = x^T times panels.

    Args:
        rows, panels: literal.
        form: literal, index into `FORMS`.
        x: address of [k, rows]: what meets one row of weights lies together. sums: of [groups, rows], x's sums.
        weights, panel: address of the first panel, and bytes from panel to panel.
        groups, group: how many, and of how many weights.
        y, y_row: address, and floats from row to row.
    """
    m, p, each = rows.literal_value, panels.literal_value, FORMS[form.literal_value]
    signature = types.void(rows, panels, form, *[types.intp] * 8)

    def generate(context, builder, signature, args):
        _Tile(builder, m, p, each).write(*args[3:])
        return context.get_dummy_value()

    return signature, generate


class _Tile(Emitter):
    def __init__(self, builder: ir.IRBuilder, rows: int, panels: int, form: Form):
        super().__init__(builder)
        self.form = form
        self.places = [(m, p, h) for m in range(rows) for p in range(panels) for h in range(_HALVES)]
        self.rows, self.columns = range(rows), [(p, h) for p in range(panels) for h in range(_HALVES)]
        # Groups are multiples of 32 weights. Half a cache line of 4-bit weights in a turn is one request ahead for it.
        self.unroll = (4 if rows == 1 else 2) if form.factor else 1

    def write(self, x, sums, weights, panel, groups, group, y, y_row) -> None:
        # Panels are too short for the processor to see where they lead: the next tile's are asked for by place.
        self.ahead = self.builder.mul(panel, self.long(len(self.columns) // _HALVES))
        total = {place: self.register(self.zero()) for place in self.places}
        panels = {p: self.at(weights, (p, panel)) for p, _ in self.columns}
        row = 4 * len(self.rows)
        if not self.form.header:
            self._sums(total, panels, x, group)
        else:
            group_bytes = self.at(self.long(self.form.header), (group, self.form.row))
            with self.loop(groups) as g:
                part = {place: self.register(self.zero()) for place in self.places}
                here = {p: self.at(start, (g, group_bytes)) for p, start in panels.items()}
                codes = {p: self.at(start, (self.form.header, 1)) for p, start in here.items()}
                self._sums(part, codes, self.at(x, (self.builder.mul(g, group), row)), group)
                for p, h in self.columns:
                    scale = self._factor(self.at(here[p], (LANES * h, self.form.factor)))
                    bias = self._factor(self.at(here[p], (WIDTH + LANES * h, self.form.factor)))
                    for m in self.rows:
                        scaled = self.fma(scale, part[m, p, h].get(), total[m, p, h].get())
                        row_sum = self.spread(self.load(self.at(sums, (g, row), (m, 4)), FLOAT))
                        total[m, p, h].set(self.fma(bias, row_sum, scaled))
        for m, p, h in self.places:
            place = self.at(y, (m, self.builder.mul(y_row, self.long(4))))
            self.store(total[m, p, h].get(), self.at(place, (WIDTH * p + LANES * h, 4)))

    def _sums(self, into, weights, x, count) -> None:
        """into += x times weights, over `count` rows of panels."""
        with self.loop(self.builder.udiv(count, self.long(self.unroll))) as turn:
            for step in range(self.unroll):
                k = self.builder.add(self.builder.mul(turn, self.long(self.unroll)), self.long(step))
                for p, start in weights.items():
                    place = self.at(start, (k, self.form.row))
                    if step == 0 and len(self.rows) <= AHEAD:
                        self.prefetch(self.at(place, (self.ahead, 1)))
                    values = self._weights(place)
                    for m in self.rows:
                        # Here and not before the panels: a sixth row leaves no register to keep it in.
                        spread = self.spread(self.load(self.at(x, (k, 4 * len(self.rows)), (m, 4)), FLOAT))
                        for h in range(_HALVES):
                            into[m, p, h].set(self.fma(spread, values[h], into[m, p, h].get()))

    def _weights(self, place: ir.Value) -> list[ir.Value]:
        """Sixteen weights of one k, before scale and bias, as two vectors."""
        if self.form.bits == 4:
            both = self.bytes_as_words(place)
            low, high = self.builder.and_(both, self.words(15)), self.builder.lshr(both, self.words(4))
            return [self.floats_of(low), self.floats_of(high)]
        read = {
            8: lambda at: self.floats_of(self.bytes_as_words(at)),
            16: self.bfloats,
            32: lambda at: self.load(at, FLOATS),
        }[self.form.bits]
        return [read(self.at(place, (LANES * h, self.form.bits // 8))) for h in range(_HALVES)]

    def _factor(self, place: ir.Value) -> ir.Value:
        return self.bfloats(place) if self.form.factor == 2 else self.load(place, FLOATS)


@intrinsic(prefer_literal=True)
def packed_tile(
    context, rows, outputs, bits, weights, row, words, turns, scales, biases, groups, shift, x, x_row, sums, y, y_row
):
    """y[rows, outputs] = x W^T for rows of packed weights as MLX lays them out: lanes are words along k.

    A lane holds a word, and its codes are taken where they stand in it, as integers that are so many times too large:
    x is as many times smaller, by powers of two, so that no product is rounded otherwise. The last code of a word is
    shifted down, lest it be negative.

    Args:
        rows, outputs, bits: literal.
        weights, row: address of the first row of W, and bytes from row to row.
        words, turns: how many are read at once, up to eight and all of one group; and how often for a row.
        scales, biases, groups, shift: addresses of float32 [outputs, groups]; turn t is of group t >> shift.
        x, x_row: address of [rows, turns, parts of a word, 8], zeros in lanes beyond `words`; bytes from row to row.
        sums: of [rows, turns], the sums of x over each turn, not scaled.
        y, y_row: address, and floats from row to row.
    """
    m, n, width = rows.literal_value, outputs.literal_value, bits.literal_value
    signature = types.void(rows, outputs, bits, *[types.intp] * 13)

    def generate(context, builder, signature, args):
        _packed(Emitter(builder), m, n, width, *args[3:])
        return context.get_dummy_value()

    return signature, generate


def _packed(
    e: Emitter, m, n, bits, weights, row, words, turns, scales, biases, groups, shift, x, x_row, sums, y, y_row
) -> None:
    b, parts = e.builder, WORD // bits
    places = [(i, j) for i in range(m) for j in range(n)]
    total = {place: e.register(e.zero()) for place in places}
    bias = {place: e.register(ir.Constant(FLOAT, 0.0)) for place in places}
    read = e.first_lanes(words)
    with e.loop(turns) as turn:
        starts = [e.at(weights, (j, row), (turn, b.mul(words, e.long(4)))) for j in range(n)]
        for start in starts:
            e.prefetch(e.at(start, (AHEAD_BYTES, 1)))
        codes = [e.load_lanes(start, read) for start in starts]
        inputs = [e.at(x, (i, x_row), (turn, 4 * LANES * parts)) for i in range(m)]
        # Two chains of additions for an output: one would wait for itself.
        dots = {(*place, chain): e.zero() for place in places for chain in range(2)}
        for part in range(parts):
            mask = e.words(((1 << bits) - 1) << bits * part)
            last = part == parts - 1
            values = [e.floats_of(b.lshr(c, e.words(bits * part)) if last else b.and_(c, mask)) for c in codes]
            for i in range(m):
                xs = e.load(e.at(inputs[i], (part, 4 * LANES)), FLOATS)
                for j, value in enumerate(values):
                    dots[i, j, part % 2] = e.fma(value, xs, dots[i, j, part % 2])
        for i, j in places:
            factor = e.at(e.long(0), (b.add(b.mul(groups, e.long(j)), b.lshr(turn, shift)), 4))
            scale = e.spread(e.load(b.add(scales, factor), FLOAT))
            total[i, j].set(e.fma(scale, b.fadd(dots[i, j, 0], dots[i, j, 1]), total[i, j].get()))
            row_sum = e.load(e.at(sums, (b.add(b.mul(turns, e.long(i)), turn), 4)), FLOAT)
            added = b.fmul(e.load(b.add(biases, factor), FLOAT), row_sum)
            bias[i, j].set(b.fadd(bias[i, j].get(), added))
    for i, j in places:
        place = e.at(y, (i, b.mul(y_row, e.long(4))), (j, 4))
        e.store(b.fadd(e.total(total[i, j].get()), bias[i, j].get()), place)
