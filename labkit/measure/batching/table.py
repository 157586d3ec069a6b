"""What a run over many numbers of rows has measured, as curves, rows of a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.measure.tables import MeasuredTable

Curves = dict[str, list[Mapping[str, Any]]]

COLUMNS = (
    "rows",
    "side",
    "tok/s",
    "processor ms a token",
    "ms between tokens",
    "worst",
    "first token, s",
    "peak MB",
    "labkit over it",
)


def curves(table: MeasuredTable | None, name: str, lengths: str = "equal", choice: str = "greedy") -> Curves:
    """side -> its points by number of rows; empty where nothing was measured.

    Args:
        table: of `recipes.measured.batching`.
        name: "batched decode" (contexts that are there) or "prompts and answers".
        lengths: "equal" or "unequal". choice: "greedy" or "sampled".
    """
    found = table.select(name=name, lengths=lengths, choice=choice) if table else []
    sides = dict.fromkeys(row["side"] for row in found)
    return {side: sorted((r for r in found if r["side"] == side), key=lambda row: row["rows"]) for side in sides}


def lines(of: Curves) -> list[list[Any]]:
    """Rows for `COLUMNS`, by number of rows: medians of rounds, and the ratio of throughputs with its spread."""
    return [
        [
            row["rows"],
            side,
            f"{row['throughput']:,.1f}",
            f"{row['processor'] * 1e3:,.2f}",
            f"{row['gap_median'] * 1e3:,.1f}",
            f"{row['gap_worst'] * 1e3:,.1f}",
            f"{row['first_mean']:,.2f}",
            f"{row['peak_bytes'] / 1e6:,.1f}",
            _ratio(row),
        ]
        for row, side in sorted(
            ((row, side) for side, rows in of.items() for row in rows), key=lambda pair: pair[0]["rows"]
        )
    ]


def _ratio(row: Mapping[str, Any]) -> str:
    if "labkit_over_this" not in row:
        return "-"
    return f"{row['labkit_over_this']:.1f} ({row['ratio_least']:.1f} to {row['ratio_most']:.1f})"


def throughput(equal: Curves, unequal: Curves, title: str) -> Any:
    """Tokens a second against rows: full lines for equal lengths, squares for unequal, grey for the floor.

    Returns:
        The matplotlib figure.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 3.6))
    for number, (side, points) in enumerate(equal.items()):
        (line,) = axes.plot(*_xy(points, "throughput"), "o-", label=side)
        axes.plot(*_xy(unequal.get(side, []), "throughput"), "s--", color=line.get_color())
        if number == 0:
            axes.plot(*_xy(points, "floor_tokens_a_second"), color="0.5", label="predicted: floor")
    ticks = sorted({row["rows"] for points in equal.values() for row in points})
    axes.set(xscale="log", yscale="log", xlabel="rows", ylabel="tokens a second", title=title)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.minorticks_off()
    if equal:
        figure.legend(loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _xy(points: Sequence[Mapping[str, Any]], what: str) -> tuple[list[float], list[float]]:
    return [row["rows"] for row in points], [row[what] for row in points]
