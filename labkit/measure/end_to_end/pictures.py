"""The plots of a comparison. Colours and fonts are matplotlib's, or whatever style the caller has chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.measure.end_to_end.curves import Curve
from labkit.measure.end_to_end.table import side_names, size_name


def speeds(records: Sequence[Mapping[str, Any]], title: str) -> Any:
    """Tokens a second against length, prefill beside decode, with the floor.

    Returns:
        The matplotlib figure.
    """
    import matplotlib.pyplot as plt

    kinds = [kind for kind in ("prefill", "decode") if any(r["kind"] == kind for r in records)]
    figure, all_axes = plt.subplots(1, len(kinds), figsize=(7.2, 4.0), squeeze=False, layout="constrained")
    for axes, kind in zip(all_axes[0], kinds, strict=True):
        chosen = sorted((r for r in records if r["kind"] == kind), key=lambda record: record["length"])
        for index, name in enumerate(side_names(records)):
            points = [(r["length"], r["sides"][name]["tokens_per_second"]) for r in chosen if name in r["sides"]]
            if points:
                axes.plot(*zip(*points, strict=True), "o-", color=f"C{index}", label=name)
        floor = [
            (r["length"], (r["length"] if kind == "prefill" else 1) / r["floor_seconds"])
            for r in chosen
            if r.get("floor_seconds")
        ]
        if floor:
            axes.plot(*zip(*floor, strict=True), "--", color="C7", label="floor (predicted)")
        _by_length(axes, [r["length"] for r in chosen])
        axes.set_title(f"{title}: {kind}" if kind == kinds[0] else kind)
        axes.set_xlabel("prompt (tokens)" if kind == "prefill" else "tokens in the cache")
        axes.set_ylabel("tokens a second")
    # Below the panels: inside one, a legend of four lines covers some line at any speed.
    entries = dict(zip(*reversed(all_axes[0][0].get_legend_handles_labels()), strict=True))
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=2, fontsize=8)
    return figure


def costs(curve: Curve, title: str) -> Any:
    """Measured seconds against length, on top of the terms that the fit makes them of.

    Returns:
        The matplotlib figure.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 3.6))
    for index, term in enumerate(curve.terms):
        if any(term.seconds):
            axes.plot(curve.lengths, term.seconds, "--", color=f"C{index + 1}", label=f"fit: {term.name}")
    axes.plot(curve.lengths, curve.fitted(), color="C7", label="fit, all terms")
    axes.plot(curve.lengths, curve.seconds, "o", color="C0", label="measured")
    _by_length(axes, curve.lengths)
    axes.set(title=title, xlabel="tokens", ylabel="seconds")
    axes.legend(fontsize=8)
    return figure


def _by_length(axes: Any, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    names = [size_name(length) for length in lengths]
    axes.set_xticks(lengths, names, fontsize=8, rotation=45 if len(lengths) > 5 else 0)
    axes.yaxis.set_major_formatter("{x:,g}")
