"""Rows of several lengths in one rectangle, drawn cell by cell: who stands where, and what a query may see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.report import style

Cell = int | str | None


def rectangles(parts: Mapping[str, Mapping[str, Sequence[Cell]]], *, title: str = "") -> Any:
    """Several rectangles below each other.

    Args:
        parts: title of each rectangle -> name of each row -> its cells: a position (blue), a word (orange), or None for
            padding (grey).
        title: above all of them.

    Returns:
        The matplotlib figure.
    """
    import matplotlib.pyplot as plt

    heights = [len(rows) + 0.9 for rows in parts.values()]
    widest = max(len(cells) for rows in parts.values() for cells in rows.values())
    figure, all_axes = plt.subplots(
        len(parts), 1, figsize=(7.2, 0.34 * sum(heights) + 0.5), height_ratios=heights, squeeze=False
    )
    for axes, (name, rows) in zip(all_axes[:, 0], parts.items(), strict=True):
        axes.set_title(name, fontsize=10)
        for at, cells in enumerate(rows.values()):
            for column, cell in enumerate(cells):
                colour = style.GREY if cell is None else style.BLUE if isinstance(cell, int) else style.ORANGE
                alpha = 0.25 if cell is None else 0.85
                box = plt.Rectangle((column + 0.04, at + 0.08), 0.92, 0.84, color=colour, alpha=alpha, linewidth=0)
                axes.add_patch(box).set_in_layout(False)  # it lies inside: the layout need not measure it
                if cell is not None:
                    inside = {"ha": "center", "va": "center", "color": "white", "fontsize": 8, "in_layout": False}
                    axes.text(column + 0.5, at + 0.5, str(cell), **inside)
        axes.set_xlim(0, widest)
        axes.set_ylim(len(rows), 0)
        axes.set_yticks([at + 0.5 for at in range(len(rows))], list(rows))
        axes.set_xticks([])
        axes.grid(visible=False)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.tick_params(length=0)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    return figure


def masks(parts: Mapping[str, Sequence[Sequence[bool]]], *, rows: Sequence[str]) -> Any:
    """What the next query of each row may see, one picture a mask: dark is seen.

    Args:
        parts: title -> bool [rows][columns].
        rows: names of the rows.

    Returns:
        The matplotlib figure.
    """
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap

    figure, all_axes = plt.subplots(1, len(parts), figsize=(7.2, 0.6 + 0.34 * len(rows)), squeeze=False, sharey=True)
    for axes, (name, mask) in zip(all_axes[0], parts.items(), strict=True):
        axes.imshow(
            [[int(seen) for seen in row] for row in mask],
            cmap=ListedColormap(["#e8e8e8", style.GREEN]),
            vmin=0,
            vmax=1,
            aspect="auto",
        )
        axes.set_title(name, fontsize=10)
        axes.set_yticks(range(len(rows)), rows)
        axes.set_xticks([])
        axes.set_xlabel("columns; green: seen")
        axes.grid(visible=False)
    return figure
