"""Axes and marks of a small SVG plot, written directly: the part of a picture that a slider keeps still."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape

WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM = 76, 30, 34, 52
# Of the text in a legend: pixels of a character, wide enough for the fonts that a page may have, and of a line.
CHARACTER, LINE = 7.2, 19
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        label: with the unit: "KV and state (MB)".
        low, high: the range shown; above zero on a logarithmic axis.
        log: 2 or 10 for a logarithmic axis with ticks at its powers, None for a linear one.
        ticks: (position, text) pairs; chosen from the range if not given.
    """

    label: str
    low: float
    high: float
    log: int | None = None
    ticks: Sequence[tuple[float, str]] | None = None

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"axis {self.label!r}: low {self.low} is not below high {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"axis {self.label!r} is logarithmic: it cannot start at {self.low}")

    def holding(self, values: Iterable[float]) -> Axis:
        """This axis, longer where `values` go beyond it; what a logarithmic one cannot show (0) stays at its edge."""
        shown = [value for value in values if value > 0 or not self.log]
        return replace(self, low=min([self.low, *shown]), high=max([self.high, *shown]))

    def share(self, value: float) -> float:
        """Where `value` lies between low (0) and high (1), not beyond either."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def tick_marks(self) -> list[tuple[float, str]]:
        if self.ticks is not None:
            return list(self.ticks)
        return [(value, _number(value)) for value in (self._powers() if self.log else self._steps())]

    def _powers(self) -> list[float]:
        first, last = (math.log(edge, self.log) for edge in (self.low, self.high))
        exponents = range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1)
        stride = math.ceil(len(exponents) / 8)
        return [float(self.log) ** e for e in exponents[::stride]]

    def _steps(self) -> list[float]:
        rough = (self.high - self.low) / 5
        unit = 10 ** math.floor(math.log10(rough))
        step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


class Canvas:
    """A plot area with fixed axes; gives SVG path data for marks and the document around them.

    Args:
        x, y: the axes.
        names: of the series; two or more stand in a legend between title and plot, where no mark can hide them.
    """

    def __init__(self, x: Axis, y: Axis, names: Sequence[str] = ()) -> None:
        self.x, self.y = x, y
        self.legend = _legend_places(names) if len(names) > 1 else []
        self.top = TOP + max((line + 1 for _, line, _ in self.legend), default=0) * LINE
        self.floor = self.top + HEIGHT - TOP - BOTTOM

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = LEFT + self.x.share(x) * (WIDTH - LEFT - RIGHT)
        down = self.floor - self.y.share(y) * (self.floor - self.top)
        return across, down

    def line(self, xs: Sequence[float], ys: Sequence[float], *, slot: int = 0, slots: int = 1) -> str:
        """Path data of a line through the points, with a dot on each where they are few."""
        points = [self.at(x, y) for x, y in zip(xs, ys, strict=True)]
        path = "".join(f"{'L' if index else 'M'}{_p(a)} {_p(b)}" for index, (a, b) in enumerate(points))
        if len(points) <= 24:
            # A dot is two half circles of radius 2.2.
            path += "".join(f"M{_p(a - 2.2)} {_p(b)}a2.2 2.2 0 1 0 4.4 0a2.2 2.2 0 1 0 -4.4 0" for a, b in points)
        return path

    def bars(self, xs: Sequence[float], ys: Sequence[float], *, slot: int = 0, slots: int = 1) -> str:
        """Path data of bars centred on xs, one unit of x wide together; series stand side by side."""
        unit = self.at(min(self.x.high, self.x.low + 1), 0)[0] - LEFT
        width = 0.76 * unit / slots
        path = ""
        for x, y in zip(xs, ys, strict=True):
            across, down = self.at(x, y)
            left = across - 0.38 * unit + slot * width
            path += f"M{_p(left)} {self.floor}V{_p(down)}h{_p(width * 0.94)}V{self.floor}z"
        return path

    def document(self, title: str, marks: str, colours: Sequence[str]) -> str:
        """The whole SVG: title, legend, grid, ticks, axis labels, and the given marks on top."""
        x_ticks = "".join(self._x_tick(value, text) for value, text in self.x.tick_marks())
        y_ticks = "".join(self._y_tick(value, text) for value, text in self.y.tick_marks())
        middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (self.top + self.floor) / 2
        low = self.floor + BOTTOM
        return (
            f'<svg viewBox="0 0 {WIDTH} {low}" role="img" aria-label="{escape(title, quote=True)}">'
            f'<text x="{LEFT}" y="16" style="font-weight:bold;font-size:13px">{escape(title)}</text>'
            f"{self._legend(colours)}{x_ticks}{y_ticks}"
            f'<path d="M{LEFT} {self.top}V{self.floor}H{WIDTH - RIGHT}" fill="none" stroke="currentColor"/>'
            f'<text x="{_p(middle_x)}" y="{low - 10}" text-anchor="middle">{escape(self.x.label)}</text>'
            f'<text transform="translate(14 {_p(middle_y)}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y.label)}</text>"
            f"{marks}</svg>"
        )

    def _x_tick(self, value: float, text: str) -> str:
        across, _ = self.at(value, self.y.low)
        return (
            f'<path d="M{_p(across)} {self.top}V{self.floor}" stroke="currentColor" stroke-opacity=".14"/>'
            f'<text x="{_p(across)}" y="{self.floor + 17}" text-anchor="middle">{escape(text)}</text>'
        )

    def _y_tick(self, value: float, text: str) -> str:
        _, down = self.at(self.x.low, value)
        return (
            f'<path d="M{LEFT} {_p(down)}H{WIDTH - RIGHT}" stroke="currentColor" stroke-opacity=".14"/>'
            f'<text x="{LEFT - 7}" y="{_p(down + 4)}" text-anchor="end">{escape(text)}</text>'
        )

    def _legend(self, colours: Sequence[str]) -> str:
        entries = zip(self.legend, colours, strict=False)
        return "".join(
            f'<rect x="{_p(left)}" y="{TOP - 7 + LINE * line}" width="11" height="11" rx="2" fill="{colour}"/>'
            f'<text x="{_p(left + 17)}" y="{TOP + 3 + LINE * line}">{escape(name)}</text>'
            for (left, line, name), colour in entries
        )


def _legend_places(names: Sequence[str]) -> list[tuple[float, int, str]]:
    """(left, line, name) of each entry: side by side, in as many lines as their texts need."""
    places, left, line = [], float(LEFT), 0
    for name in names:
        width = 17 + CHARACTER * len(name)
        if left + width > WIDTH and left > LEFT:
            left, line = float(LEFT), line + 1
        places.append((left, line, name))
        left += width + 14
    return places


def _p(value: float) -> str:
    """A coordinate with one decimal at most: a tenth of a pixel is enough, and bytes count."""
    return f"{value:.1f}".removesuffix(".0")


def _number(value: float) -> str:
    if 0 < abs(value) < 1e-4 and f"{value:e}".startswith(("1.000000", "-1.000000")):
        return f"{'-' * (value < 0)}10{str(round(math.log10(abs(value)))).translate(_RAISED)}"
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:,.10g}" if value >= 1000 or value == int(value) else f"{value:g}"
