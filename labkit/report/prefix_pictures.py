"""Drawings of prompts as chains of blocks, and of the boundaries that keep a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.report import style

COLOURS = {
    "system": style.BLUE,
    "tools": style.ORANGE,
    "user": style.GREEN,
    "assistant": style.PINK,
    "generation prompt": style.GREY,
}


def chains(prompts: Mapping[str, Any], width: int, title: str, *, against_first: bool = False) -> Any:
    """One strip a prompt: its segments in colour, its blocks below, dark where the prompt above has the same block.

    Args:
        prompts: name -> something with `tokens` and `segments`.
        width: tokens of a block.
        title: the picture's title.
        against_first: compare with the first prompt, not with the one above.

    Returns:
        The matplotlib figure.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 0.72 * len(prompts) + 1.3))
    sources = list(dict.fromkeys(_label(s) for prompt in prompts.values() for s in prompt.segments))
    colours = {name: COLOURS.get(name, style.SKY) for name in sources}
    above: Sequence[int] = ()
    for row, prompt in enumerate(prompts.values()):
        for segment in prompt.segments:
            box = (segment.start, row - 0.36), segment.end - segment.start, 0.4
            axes.add_patch(plt.Rectangle(*box, color=colours[_label(segment)], linewidth=0))
        for start in range(0, len(prompt.tokens) - width + 1, width):
            same = list(above[: start + width]) == list(prompt.tokens[: start + width])
            colour = "black" if same else "white"
            axes.add_patch(
                plt.Rectangle((start + 0.5, row + 0.1), width - 1, 0.16, facecolor=colour, edgecolor="black", lw=0.8)
            )
        if row == 0 or not against_first:
            above = prompt.tokens
    axes.set_yticks(range(len(prompts)), prompts)
    axes.set_ylim(len(prompts) - 0.4, -0.6)
    axes.set_xlim(0, max(len(prompt.tokens) for prompt in prompts.values()) + 1)
    axes.set_xlabel(f"token; blocks of {width}, black: as in the {'first prompt' if against_first else 'prompt above'}")
    axes.set_title(title)
    axes.grid(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    figure.legend(handles, colours, loc="outside lower center", ncols=5, fontsize=8)
    return figure


def kept_states(rows: Mapping[str, Sequence[int]], blocks: int, title: str, axis: str = "") -> Any:
    """One line of boundaries a row, filled where a state is kept.

    Args:
        rows: name -> the boundaries, from 1, that keep their state.
        blocks: boundaries in all.
        title, axis: of the picture, and what tells its rows apart.

    Returns:
        The matplotlib figure.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 0.24 * len(rows) + 1.2))
    for row, kept in enumerate(rows.values()):
        empty = [block for block in range(1, blocks + 1) if block not in set(kept)]
        axes.scatter(empty, [row] * len(empty), s=10, facecolor="white", edgecolor=style.GREY, linewidth=0.6)
        axes.scatter(list(kept), [row] * len(kept), s=22, color=style.BLUE)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, blocks + 1)
    axes.set_xlabel("boundary (blocks from the prompt's beginning)")
    axes.set_ylabel(axis)
    axes.set_title(title)
    axes.grid(False)
    return figure


def _label(segment: Any) -> str:
    return segment.source if segment.role == "template" else segment.role
