"""Pictures of requests under memory pressure: who was where, and the bytes below their ceiling."""

from __future__ import annotations

from typing import Any

from labkit.report.style import BLUE, GREEN, GREY, ORANGE, RED, SKY

PLACES = {
    "waiting": ("waiting", "#dddddd"),
    "prefill": ("prompt is computed", SKY),
    "decode": ("answers", BLUE),
    "parked": ("parked", ORANGE),
    "paused": ("paused", GREEN),
}


def film(run: Any, title: str, *, steps: int | None = None) -> Any:
    """Requests as bars over the steps, above the bytes of caches and of others with the ceiling; returns the figure.

    Args:
        run: a `labkit.measure.pressure_film.Film`.
        steps: where the picture ends, so that several films have one scale; this run's own if not given.
    """
    import matplotlib.pyplot as plt

    width = steps or len(run.places)
    figure, (above, below) = plt.subplots(2, 1, figsize=(7.2, 4.4), sharex=True, height_ratios=(1, 1.4))
    for row in range(len(run.ids)):
        for first, last, place in _stretches([places[row] for places in run.places]):
            if place in PLACES:
                bars = above.barh(row, last - first, left=first, height=0.7, color=PLACES[place][1])
                bars.patches[0].set_in_layout(False)  # it lies inside: the layout need not measure it
    for step, id, kind in run.moves:
        if kind == "aborted":
            above.plot(step, run.ids.index(id), "x", color=RED, markersize=9, markeredgewidth=2.5, clip_on=False)
    above.set_yticks(range(len(run.ids)), run.ids)
    above.invert_yaxis()
    above.grid(False)
    above.set_title(title)
    used = {place for places in run.places for place in places}
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for place, (_, colour) in PLACES.items() if place in used]
    names = [name for place, (name, _) in PLACES.items() if place in used]
    if any(kind == "aborted" for _, _, kind in run.moves):
        handles.append(plt.Line2D([], [], color=RED, marker="x", linestyle="", markersize=8, markeredgewidth=2))
        names.append("ended with an error")
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize=9)
    pairs = list(zip(run.bytes, run.outside, strict=True))
    # Only where something changes: caches grow in steps, and every point costs bytes of the picture.
    steps = [step for step, pair in enumerate(pairs) if step in (0, len(pairs) - 1) or pair != pairs[step - 1]]
    mega = [pairs[step][0] / 1e6 for step in steps]
    total = [sum(pairs[step]) / 1e6 for step in steps]
    below.fill_between(steps, 0, mega, step="post", color=SKY, alpha=0.6, linewidth=0)
    below.fill_between(steps, mega, total, step="post", color=GREY, alpha=0.35, linewidth=0)
    below.axhline(run.ceiling_bytes / 1e6, color=RED, linewidth=1.4)
    below.axhline(run.hard_bytes / 1e6, color=ORANGE, linewidth=1.2, linestyle="--")
    # Beside the axes: inside, caches and others reach up to both lines.
    beside = {"transform": below.get_yaxis_transform(), "fontsize": 9, "clip_on": False}
    below.text(1.01, run.ceiling_bytes / 1e6, "ceiling", color=RED, va="bottom", **beside)
    below.text(1.01, run.hard_bytes / 1e6, "hard line", color=ORANGE, va="top", **beside)
    if any(run.outside):
        at = next(step for step, value in enumerate(run.outside) if value)
        middle = run.bytes[at] + run.outside[at] / 2
        below.text(at + 1, middle / 1e6, "others", color="#444444", va="center", fontsize=9)
    below.set_ylim(0, 1.15 * max(run.ceiling_bytes / 1e6, *total))
    below.set_ylabel("MB of caches")
    below.set_xlabel("step")
    below.set_xlim(0, width)
    return figure


def _stretches(places: list[str]) -> list[tuple[int, int, str]]:
    """(first step, step after the last, place) of each unbroken stretch."""
    found, first = [], 0
    for step in range(1, len(places) + 1):
        if step == len(places) or places[step] != places[first]:
            found.append((first, step, places[first]))
            first = step
    return found
