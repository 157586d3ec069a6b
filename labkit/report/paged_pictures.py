"""Pictures of paged memory: a pool as a field of blocks, tables that point into it, what is wasted over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from labkit.report.style import COLOURS, GREY

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

    lines = -(-len(owners) // columns)
    figure, axes = plt.subplots(figsize=(7.2, 0.55 + 0.27 * lines))
    for at, owner in enumerate(owners):
        _square(axes, at % columns, at // columns, owner, framed=at + 1 in shared)
    axes.set(xlim=(0, columns), ylim=(lines, 0), title=title, aspect="equal")
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
        colour = COLOURS[line % len(COLOURS)]
        axes.add_patch(
            plt.Rectangle((len(blocks) + 0.04, line + 0.08), 0.92 * share, 0.84, facecolor=colour, alpha=0.55)
        )
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

    colour = COLOURS[(owner - 1) % len(COLOURS)] if owner > 0 else FREE_COLOUR if owner == 0 else EMPTY_COLOUR
    edge, width = ("black", 1.6) if framed else ("white", 0.6)
    alpha = 0.55 if owner > 0 else 1.0
    axes.add_patch(
        Rectangle((x + 0.04, y + 0.08), 0.92, 0.84, facecolor=colour, edgecolor=edge, linewidth=width, alpha=alpha)
    )
