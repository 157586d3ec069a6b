"""Drawings of what a kernel does with memory: lanes on lines, traffic side by side, columns cut into parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.kernels.simulator import Traffic
from labkit.report import style

LINE_BYTES = 128


def lanes_on_lines(
    requests: Mapping[str, Sequence[int]], title: str, *, bytes_each: int | Mapping[str, int], lines: int = 8
) -> Any:
    """One memory request of a simdgroup: which bytes of which 128-byte lines its 32 lanes ask for.

    Args:
        requests: for each access pattern the byte address of every lane; one panel each.
        title: the picture's title.
        bytes_each: bytes that one lane asks for, in every pattern or by its name.
        lines: touched lines drawn at most; a panel says how many more there are.

    Returns:
        The matplotlib figure.
    """
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(requests), figsize=(7.2, 1.15 + 0.23 * lines), squeeze=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    for axes, (name, addresses) in zip(panels[0], requests.items(), strict=True):
        each = bytes_each if isinstance(bytes_each, int) else bytes_each[name]
        touched = sorted({byte // LINE_BYTES for a in addresses for byte in (a, a + each - 1)})
        shown = touched[:lines]
        for place, line in enumerate(shown):
            axes.broken_barh([(0, LINE_BYTES)], (place - 0.4, 0.8), color="#d6e6f2")
            spans = [(a - line * LINE_BYTES, each) for a in addresses if a // LINE_BYTES == line]
            axes.broken_barh(spans, (place - 0.4, 0.8), color=style.BLUE)
        share = len(set(addresses)) * each / (len(touched) * LINE_BYTES)
        below = f"; {len(touched) - lines} more below" if len(touched) > lines else ""
        count = f"{len(touched)} line" + ("s" if len(touched) > 1 else "")
        axes.set_title(f"{name}\n{count} moved, {share:.0%} used{below}", fontsize=9, fontweight="normal")
        axes.set_yticks(range(len(shown)), [str(line) for line in shown], fontsize=8)
        axes.set(
            xlim=(0, LINE_BYTES),
            ylim=(lines - 0.4, -0.6),
            xticks=[0, 32, 64, 96, 128],
            xlabel="byte of a 128-byte line",
        )
        axes.grid(False)
    panels[0][0].set_ylabel("line")
    return figure


def traffic_bars(runs: Mapping[str, Traffic], title: str, memories: Sequence[str] | None = None) -> Any:
    """Counted traffic of several kernels that do the same work: what must move, what is asked for, what lines cost.

    Args:
        runs: the counted traffic of each kernel.
        title: the picture's title.
        memories: names of the buffers that count; all by default.

    Returns:
        The matplotlib figure.
    """
    import matplotlib.pyplot as plt

    parts = {"distinct lines, once": [], "asked for by threads": [], "lines of all requests": []}
    for traffic in runs.values():
        flows = [flow for flow in traffic.buffers if memories is None or flow.memory in memories]
        parts["distinct lines, once"].append(sum(flow.footprint for flow in flows))
        parts["asked for by threads"].append(sum(flow.bytes for flow in flows))
        parts["lines of all requests"].append(sum(flow.lines for flow in flows) * LINE_BYTES)
    figure, axes = plt.subplots(figsize=(7.2, 1.2 + 0.62 * len(runs)))
    for slot, (name, sizes) in enumerate(parts.items()):
        places = [row + 0.26 * (slot - 1) for row in range(len(runs))]
        colour = (style.GREEN, style.BLUE, style.ORANGE)[slot]
        bars = axes.barh(places, [size / 1024 for size in sizes], 0.24, label=name, color=colour)
        axes.bar_label(bars, [f"{size / 1024:,.1f}".removesuffix(".0") for size in sizes], padding=3, fontsize=8)
    axes.set_yticks(range(len(runs)), list(runs))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel("KiB, counted")
    axes.set_title(title)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    return figure


def column_parts(layouts: Mapping[str, Sequence[Sequence[tuple[int, int]]]], capacity: int, title: str) -> Any:
    """Which columns of each row every part holds, one panel a layout.

    Args:
        layouts: for each layout and row the (begin, end) of every part; an empty part is not drawn.
        capacity: columns of the cache.
        title: the picture's title.

    Returns:
        The matplotlib figure.
    """
    import matplotlib.pyplot as plt

    rows = max(map(len, layouts.values()))
    figure, panels = plt.subplots(
        len(layouts), 1, figsize=(7.2, 0.8 + len(layouts) * (0.55 + 0.33 * rows)), squeeze=False, sharex=True
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    for axes, (name, cut) in zip(panels[:, 0], layouts.items(), strict=True):
        for row, parts in enumerate(cut):
            axes.barh(row, capacity, 0.8, color="#f2f2f2")
            for index, (begin, end) in enumerate(parts):
                if begin >= end:
                    continue
                colour = style.COLOURS[index % len(style.COLOURS)]
                axes.barh(row, end - begin, 0.8, left=begin, color=colour, edgecolor="white", linewidth=1.2)
                axes.text((begin + end) / 2, row, str(index), ha="center", va="center", color="white", fontsize=8)
        axes.set_yticks(range(len(cut)), [f"row {row}" for row in range(len(cut))])
        axes.invert_yaxis()
        axes.grid(False)
        axes.set_title(name, fontsize=9, fontweight="normal")
    panels[-1, 0].set(xlim=(0, capacity), xlabel="column of the cache (numbers: the part that reads it)")
    return figure


def merge(tops: Sequence[float], sums: Sequence[float], title: str) -> Any:
    """How much each part counts in the merged output, beside the largest score that decides it.

    Args:
        tops: each part's largest score, in powers of two; -inf for a part without columns.
        sums: each part's sum of weights relative to its own largest score.
        title: the picture's title.

    Returns:
        The matplotlib figure.
    """
    import matplotlib.pyplot as plt

    highest = max(tops)
    shares = [
        0.0 if top == float("-inf") else 2 ** (top - highest) * total for top, total in zip(tops, sums, strict=True)
    ]
    shares = [share / sum(shares) for share in shares]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(7.2, 2.6))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    panels = (
        (left, tops, "largest score (log2)", "{:.1f}"),
        (middle, sums, "sum at that scale", "{:.1f}"),
        (right, shares, "share of the output", "{:.0%}"),
    )
    for axes, values, name, form in panels:
        colours = [style.COLOURS[index % len(style.COLOURS)] for index in range(len(values))]
        drawn = [0.0 if value == float("-inf") else value for value in values]
        bars = axes.bar(range(len(values)), drawn, color=colours)
        axes.bar_label(bars, [form.format(value) for value in values], fontsize=8, padding=2)
        axes.set_xticks(range(len(values)))
        axes.set_title(name, fontsize=9, fontweight="normal")
        axes.set_xlabel("part")
        axes.margins(y=0.15)
        axes.grid(axis="x", visible=False)
    return figure
