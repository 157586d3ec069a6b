"""Pictures of paged memory: a pool as a field of blocks, tables that point into it, what is wasted over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from labkit.report.style import COLOURS, GREY

ROWS = COLOURS[:-1]  # grey is for what nobody uses

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FREE_COLOUR, EMPTY_COLOUR = "#e4e4e4", "#f8f8f8"


def pool(owners: Sequence[int], title: str, *, shared: Sequence[int] = (), columns: int = 24) -> Figure:
    """A field of the pool's blocks, each in its owner's colour.

    Args:
        owners: of blocks 1, 2, ...: a number from 1 on, 0 for free, -1 for no memory yet.
        shared: numbers of blocks that several rows use; they get a dark frame.
        columns: blocks of a line.
    """
    import matplotlib.pyplot as plt
    import numpy as np

    # One small image: hundreds of squares as shapes would weigh a page down, frame by frame of a film.
    side, lines = 12, -(-len(owners) // columns)
    image = np.ones((lines * side, columns * side, 3))
    for at, owner in enumerate(owners):
        y, x = at // columns * side, at % columns * side
        if at + 1 in shared:
            image[y + 1 : y + side - 1, x + 1 : x + side - 1] = 0
        image[y + 2 : y + side - 2, x + 2 : x + side - 2] = _colour(owner)
    figure, axes = plt.subplots(figsize=(7.2, 0.55 + 6.9 / columns * lines))
    axes.imshow(image, interpolation="nearest")
    axes.set(title=title)
    axes.axis("off")
    return figure


def tables(rows: Mapping[str, Sequence[int]], held: Mapping[str, int], block_tokens: int, title: str) -> Figure:
    """Each row's table: the numbers of its blocks, and its tail as far as it is filled.

    Args:
        rows: name -> blocks. held: name -> tokens in the tail.
    """
    import matplotlib.pyplot as plt

    uses = [block for blocks in rows.values() for block in blocks]
    longest = max(len(blocks) for blocks in rows.values()) + 1
    figure, axes = plt.subplots(figsize=(7.2, 0.7 + 0.42 * len(rows)))
    for line, (name, blocks) in enumerate(rows.items()):
        axes.text(-0.15, line + 0.5, name, ha="right", va="center", fontsize=9)
        for at, block in enumerate(blocks):
            _square(axes, at, line, line + 1, framed=uses.count(block) > 1)
            axes.text(at + 0.5, line + 0.5, str(block), ha="center", va="center", fontsize=9)
        share = held[name] / block_tokens
        axes.add_patch(
            plt.Rectangle((len(blocks) + 0.04, line + 0.08), 0.92, 0.84, facecolor=EMPTY_COLOUR, ec=GREY, lw=0.6)
        )
        colour = _colour(line + 1)
        axes.add_patch(plt.Rectangle((len(blocks) + 0.04, line + 0.08), 0.92 * share, 0.84, facecolor=colour))
    axes.set(xlim=(-2.2, max(longest, 10)), ylim=(len(rows), 0), title=title)
    axes.axis("off")
    return figure


def over_time(steps: Sequence[float], series: Mapping[str, Sequence[float]], ylabel: str, title: str) -> Figure:
    """Lines over steps."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 3.2))
    for name, values in series.items():
        axes.plot(steps, values, label=name)
    axes.set(xlabel="step", ylabel=ylabel, title=title, ylim=(0, None))
    axes.legend(fontsize=8)
    return figure


def _square(axes: Axes, x: float, y: float, owner: int, *, framed: bool) -> None:
    from matplotlib.patches import Rectangle

    edge, width = ("black", 1.6) if framed else ("white", 0.6)
    axes.add_patch(
        Rectangle((x + 0.04, y + 0.08), 0.92, 0.84, facecolor=_colour(owner), edgecolor=edge, linewidth=width)
    )


def _colour(owner: int) -> tuple[float, float, float]:
    """Of a row, lightened so that numbers can be read on it; grey for free, nearly white for no memory yet."""
    from matplotlib.colors import to_rgb

    if owner <= 0:
        return to_rgb(FREE_COLOUR if owner == 0 else EMPTY_COLOUR)
    return tuple(0.35 + 0.65 * part for part in to_rgb(ROWS[(owner - 1) % len(ROWS)]))
