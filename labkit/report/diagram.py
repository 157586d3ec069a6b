"""Drawings of a model and of ways through a machine: layers, parts of a total, waterfalls, chains of places."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.report import style

LAYER_COLOURS = {"full attention": style.ORANGE, "Gated DeltaNet": style.BLUE}


def layer_stack(kinds: Sequence[str], mixer: str, title: str) -> Any:
    """The layers as a strip from embedding to head: one block a layer, coloured by how it mixes tokens.

    Args:
        kinds: for each layer "full attention" or "Gated DeltaNet".
        mixer: what follows in every layer: "32 experts, 4 a token + 1 shared".
        title: the picture's title.

    Returns:
        The matplotlib figure.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 1.9))
    axes.set_axis_off()
    axes.set_title(title)
    count = len(kinds)
    for index, kind in enumerate(kinds):
        axes.add_patch(plt.Rectangle((index + 1.1, 1.05), 0.8, 0.9, color=LAYER_COLOURS[kind], linewidth=0))
        axes.add_patch(plt.Rectangle((index + 1.1, 0.1), 0.8, 0.8, color=style.GREEN, alpha=0.75, linewidth=0))
    for left, text in ((-0.9, "embed"), (count + 1.2, "head")):
        axes.add_patch(plt.Rectangle((left, 0.1), 1.8, 1.85, color=style.GREY, alpha=0.6, linewidth=0))
        axes.text(left + 0.9, 1.02, text, ha="center", va="center", rotation=90 if count > 16 else 0)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in LAYER_COLOURS.values()]
    handles.append(plt.Rectangle((0, 0), 1, 1, color=style.GREEN, alpha=0.75))
    names = [f"{kind} ({list(kinds).count(kind)})" for kind in LAYER_COLOURS]
    axes.legend(handles, [*names, mixer], loc="upper center", bbox_to_anchor=(0.5, 0.06), ncols=3, fontsize=9)
    axes.set_xlim(-1.2, count + 3.3)
    axes.set_ylim(-0.6, 2.1)
    return figure


def shares(parts: Mapping[str, Mapping[str, float]], title: str, unit: str = "share of the total") -> Any:
    """One horizontal bar a row, divided by part: what a total is made of.

    Args:
        parts: for each row the size of each part; a row is scaled to its own total.
        title: the picture's title.
        unit: label of the axis.

    Returns:
        The matplotlib figure.
    """
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for row in parts.values() for name in row))
    names.sort(key=lambda name: -max(row.get(name, 0) / sum(row.values()) for row in parts.values()))
    figure, axes = plt.subplots(figsize=(7.2, 0.55 * len(parts) + 1.4 + 0.2 * (len(names) > 5)))
    left = [0.0] * len(parts)
    for index, name in enumerate(names):
        widths = [row.get(name, 0) / sum(row.values()) for row in parts.values()]
        colour = style.COLOURS[index % len(style.COLOURS)]
        axes.barh(list(parts), widths, left=left, label=name, color=colour, alpha=1 if index < 8 else 0.5, height=0.62)
        for row, (start, width) in enumerate(zip(left, widths, strict=True)):
            if width > 0.06:
                axes.text(start + width / 2, row, f"{width:.0%}", ha="center", va="center", color="white", fontsize=8)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel(unit)
    axes.set_title(title)
    axes.grid(False)
    figure.legend(loc="outside lower center", ncols=5, fontsize=8)
    return figure


def waterfall(steps: Mapping[str, float], title: str, unit: str) -> Any:
    """From a floor to a measured total: each part starts where the one before it ended.

    Args:
        steps: sizes in order, which sum to what was measured; the first is the floor, the others are what comes on top.
            One below zero leads back: less was measured than the parts before it foretold.
        title: the picture's title.
        unit: label of the axis.

    Returns:
        The matplotlib figure.
    """
    import matplotlib.pyplot as plt

    names, total = [*steps, "measured"], sum(steps.values())
    furthest = max(itertools.accumulate(steps.values()))
    figure, axes = plt.subplots(figsize=(7.2, 0.45 * len(names) + 1.1))
    left = 0.0
    for row, size in enumerate(steps.values()):
        colour = style.GREEN if row == 0 else style.ORANGE if size >= 0 else style.SKY
        axes.barh(row, size, left=left, color=colour, height=0.62)
        axes.text(max(left, left + size) + 0.01 * furthest, row, _short(size), va="center", fontsize=9)
        left += size
    axes.barh(len(steps), total, color=style.BLUE, height=0.62)
    axes.text(total + 0.01 * furthest, len(steps), _short(total), va="center", fontsize=9)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, furthest * 1.12)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel(unit)
    axes.set_title(title)
    return figure


def parts(sizes: Mapping[str, float], title: str, unit: str) -> Any:
    """What a total is made of, a bar each with its size beside it; a size of zero is no empty line.

    Args:
        sizes: by name, in order.
        title: the picture's title.
        unit: label of the axis.

    Returns:
        The matplotlib figure.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 0.34 * len(sizes) + 0.75))
    bars = axes.barh(list(sizes), list(sizes.values()), color=style.BLUE, height=0.7)
    axes.bar_label(bars, [_short(size) for size in sizes.values()], padding=3, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set(xlabel=unit, title=title)
    axes.grid(axis="y", visible=False)
    return figure


def _short(size: float) -> str:
    return f"{size:,.0f}" if abs(size) >= 100 else f"{size:.3g}"


PLACE_COLOURS = {
    "memory": style.ORANGE,
    "threadgroup": style.SKY,
    "registers": style.GREEN,
    "matrix unit": style.BLUE,
    "host": style.RED,
}


def chains(ways: Mapping[str, Sequence[tuple[str, str]]], title: str, width: int = 14) -> Any:
    """Ways of doing one thing, a row each: boxes from left to right, coloured by where what they name lives.

    Args:
        ways: for each way its boxes in order, each (text, place) with a place of `PLACE_COLOURS`.
        title: the picture's title.
        width: characters of a line inside a box.

    Returns:
        The matplotlib figure.

    Raises:
        ValueError: a place that has no colour.
    """
    import textwrap

    import matplotlib.pyplot as plt

    places = [place for boxes in ways.values() for _, place in boxes]
    if unknown := set(places) - set(PLACE_COLOURS):
        raise ValueError(f"places are {', '.join(PLACE_COLOURS)}, not {', '.join(sorted(unknown))}")
    longest = max(map(len, ways.values()))
    figure, axes = plt.subplots(figsize=(7.2, 0.75 + 0.95 * len(ways)))
    axes.set_axis_off()
    axes.set_title(title)
    for row, (name, boxes) in enumerate(ways.items()):
        axes.text(-0.06, -row + 0.42, name, ha="left", va="bottom", fontsize=9)
        for column, (text, place) in enumerate(boxes):
            box = plt.Rectangle((column, -row - 0.26), 0.8, 0.62, color=PLACE_COLOURS[place], alpha=0.28, linewidth=0)
            axes.add_patch(box)
            axes.plot([column, column], [-row - 0.26, -row + 0.36], color=PLACE_COLOURS[place], linewidth=3)
            wrapped = textwrap.fill(text, width)
            axes.text(column + 0.4, -row + 0.05, wrapped, ha="center", va="center", fontsize=8)
            if column:
                arrow = {"arrowstyle": "-|>", "color": "#555555", "shrinkA": 0, "shrinkB": 0}
                axes.annotate("", (column - 0.02, -row + 0.05), (column - 0.18, -row + 0.05), arrowprops=arrow)
    used = [place for place in PLACE_COLOURS if place in places]
    handles = [plt.Rectangle((0, 0), 1, 1, color=PLACE_COLOURS[place], alpha=0.6) for place in used]
    figure.legend(handles, used, loc="outside lower center", ncols=len(used), fontsize=8)
    axes.set_xlim(-0.1, max(longest, 4) - 0.15)
    axes.set_ylim(-len(ways) + 0.65, 0.75)
    return figure
