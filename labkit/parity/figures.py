"""Pictures of a comparison, for notebooks. Colours come from the plot style in use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from labkit.parity.report import ParityReport

SMALLEST = 1e-4  # margin that is told from zero
FLOOR = 1e-9  # a difference of zero still wants a place on a logarithmic axis


def prefixes(rows: Mapping[str, Sequence[str]], wrong: Mapping[str, Sequence[bool]], title: str) -> Any:
    """Rows of tokens as boxes; those that differ from the first row's are marked.

    Args:
        rows: for each name its tokens, all equally many.
        wrong: for each name which of them to mark.
        title: the picture's title.
    """
    import matplotlib.pyplot as plt

    count = len(next(iter(rows.values())))
    figure, axes = plt.subplots(figsize=(7.2, 0.5 * len(rows) + 0.6))
    axes.set_axis_off()
    axes.set_title(title)
    for line, (name, tokens) in enumerate(rows.items()):
        axes.text(-0.2, -line, name, ha="right", va="center", fontsize=9)
        for column, (token, marked) in enumerate(zip(tokens, wrong[name], strict=True)):
            colour = "C5" if marked else "C0"
            box = plt.Rectangle((column + 0.04, -line - 0.36), 0.92, 0.72, color=colour, alpha=0.3, linewidth=0)
            axes.add_patch(box).set_in_layout(False)  # it lies inside: the layout need not measure it
            label = token.replace("\n", "⏎").strip() or "·"
            inside = {"ha": "center", "va": "center", "fontsize": 6.5, "in_layout": False}
            axes.text(column + 0.5, -line, label[:6], **inside)
    axes.set_xlim(-0.22 * count, count)
    axes.set_ylim(-len(rows) + 0.4, 0.6)
    return figure


def along(reports: Mapping[str, ParityReport], title: str) -> Any:
    """Largest logit difference at every position, one line a report, with the bound that the tolerance sets."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    for name, report in reports.items():
        differences = np.maximum(report.comparison.max_difference, FLOOR)
        axes.semilogy(np.arange(len(differences)), differences, ".", markersize=3, label=name)
    bounds = {report.tolerance.max_logit_difference for report in reports.values()} - {None}
    for bound in bounds:
        axes.axhline(bound, color="C5", linestyle="--", label=f"bound {bound:.0e}")
    axes.minorticks_off()
    low, high = axes.get_ylim()
    axes.set_ylim(10.0 ** np.floor(np.log10(low)), 10.0 ** np.ceil(np.log10(high)))
    axes.set_xlabel("position")
    axes.set_ylabel("largest logit difference (nat)")
    axes.set_title(title)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)
    return figure


def bars(values: Mapping[str, float], bound: float, baseline: float, title: str) -> Any:
    """One logarithmic bar a mistake: how far it moves the logits, against the bound and the correct model."""
    import matplotlib.pyplot as plt

    names = sorted(values, key=values.get)
    figure, axes = plt.subplots(figsize=(7.2, 0.24 * len(names) + 1.2))
    heights = [max(values[name], FLOOR) for name in names]
    axes.barh(names, heights, left=FLOOR, color=["C5" if height > bound else "C7" for height in heights], height=0.7)
    axes.axvline(bound, color="C5", linestyle="--")
    axes.axvline(max(baseline, FLOOR), color="C0")
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xlim(baseline / 30, 100)
    axes.set_xlabel("largest logit difference (nat); blue: no mistake, dashed: the bound")
    axes.set_title(title)
    axes.grid(axis="y", visible=False)
    return figure


def roundings(costs: Sequence[Mapping[str, Any]], predicted: Mapping[str, float], title: str) -> Any:
    """A bar a case of `labkit.parity.roundings.cost`: its mean KL, parted by whether the same experts were chosen.

    Args:
        costs: the cases. predicted: mean KL in nats, of some of them, marked.
    """
    import matplotlib.pyplot as plt

    costs = sorted(costs, key=lambda cost: cost["mean_kl"])
    names = [cost["case"] for cost in costs]
    moved = [cost["moved_positions"] / cost["positions"] * (cost["mean_kl_moved"] or 0.0) for cost in costs]
    same = [cost["mean_kl"] - part for cost, part in zip(costs, moved, strict=True)]
    figure, axes = plt.subplots(figsize=(7.2, 0.24 * len(costs) + 1.2))
    axes.barh(names, same, color="C0", height=0.7, label="where the same experts were chosen")
    axes.barh(names, moved, left=same, color="C1", height=0.7, label="where others were")
    for name, value in predicted.items():
        axes.plot([value], [name], "|", color="black", markersize=14, label=f"predicted for {name}")
    axes.set_xlabel("mean KL to the exact model (nat)")
    axes.set_title(title)
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower right")
    return figure


def ties(report: ParityReport, title: str) -> Any:
    """Every flip by how decided both sides are; shaded, how wide a tie may be: the larger the logits, the wider."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(layout="constrained")
    flips = report.disagreements
    for verdict, marker, colour in (("near tie", "o", "C2"), ("defect", "X", "C5")):
        chosen = [item for item in flips if item.verdict == verdict]
        axes.scatter(
            [max(item.margin_reference, SMALLEST) for item in chosen],
            [max(item.margin_candidate, SMALLEST) for item in chosen],
            s=25,
            marker=marker,
            color=colour,
            linewidths=0,  # there may be hundreds, and each line is as much text again
            label=f"{verdict} ({len(chosen)})",
        )
    for edge in sorted({item.tie_width for item in flips} or {0.125}):
        box = plt.Rectangle((SMALLEST, SMALLEST), edge - SMALLEST, edge - SMALLEST, color="C2", alpha=0.12, linewidth=0)
        box.set_label("as wide as a tie" if not axes.patches else None)
        axes.add_patch(box)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_xlabel(f"margin of the reference between the two tokens (nat; {SMALLEST:g} and less at the edge)")
    axes.set_ylabel("margin of the candidate (nat)")
    axes.set_title(title)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def widths(sizes: Sequence[int], half_widths: Sequence[float], marks: Mapping[str, float], title: str) -> Any:
    """Half width of the interval on the perplexity change against the number of positions, with levels to compare."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    percent = 100 * np.asarray(half_widths)
    axes.loglog(sizes, percent, "o-", label="half width of the 95 % interval")
    guide = percent[-1] * np.sqrt(sizes[-1] / np.asarray(sizes, dtype=float))
    axes.loglog(sizes, guide, ":", color="C7", label="one over the square root of N")
    for index, (name, level) in enumerate(marks.items()):
        axes.axhline(100 * level, color=f"C{4 + index}", linestyle="--", label=name)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("positions N")
    axes.set_ylabel("perplexity change (%)")
    axes.set_title(title)
    axes.legend()
    return figure
