"""A step drawn: its launches by stage, what waits for what, and the longest chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.measure.trace.step import Launch, StepTrace

KINDS = {
    "weights": ("C0", "reads a parameter matrix above 64 KiB"),
    "memory": ("C1", "attention, recurrence, caches"),
    "glue": ("C7", "everything else"),
}

_MEMORY = ("attention", "gated_delta", "SliceUpdate", "decode_attention", "merge", "conv")


def kind_of(launch: Launch) -> str:
    """Which of KINDS a launch is."""
    if any(part in launch.name for part in _MEMORY):
        return "memory"
    largest = max((value.nbytes for value in launch.inputs), default=0)
    return "weights" if launch.label and largest > 64 * 1024 else "glue"


def draw(trace: StepTrace, title: str, *, first: int = 1, last: int | None = None, names: bool = False) -> Any:
    """Launches as dots, one column a stage; lines to what they wait for; the longest chain in red.

    Args:
        trace: of a step. title: the picture's.
        first, last: stages drawn.
        names: write each launch's name beside its dot, for a few stages.

    Returns:
        The matplotlib figure.
    """
    import matplotlib.pyplot as plt
    from matplotlib.collections import LineCollection

    last = min(last or trace.stages, trace.stages)
    shown = [i for i, launch in enumerate(trace.launches) if first <= launch.stage <= last]
    places = _places(trace.launches, shown)
    height = max((abs(y) for _, y in places.values()), default=1) + 1
    width = (0.66 if names else 0.11) * (last - first + 1) + 1.5
    size = min(max(width, 7.2), 60), 0.4 * 2 * height + 1.4 if names else 3.4
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    chain = {id(launch) for launch in trace.longest_chain()}
    edges = {False: [], True: []}
    for index in shown:
        launch = trace.launches[index]
        for source in launch.before:
            if source in places:
                critical = id(launch) in chain and id(trace.launches[source]) in chain
                edges[critical and launch.stage == trace.launches[source].stage + 1].append(
                    [places[source], places[index]]
                )
    axes.add_collection(LineCollection(edges[False], colors="0.75", linewidths=0.6, zorder=1))
    axes.add_collection(LineCollection(edges[True], colors="C5", linewidths=1.6, zorder=2))
    for kind, (colour, label) in KINDS.items():
        points = [places[i] for i in shown if kind_of(trace.launches[i]) == kind]
        if points:
            axes.scatter(*zip(*points, strict=True), s=26 if names else 11, color=colour, label=label, zorder=3)
    if names:
        for index in shown:
            axes.annotate(
                trace.launches[index].name, places[index], xytext=(3, 4), textcoords="offset points", fontsize=6.5,
                rotation=32,
            )  # fmt: skip
    axes.set(title=title, xlabel="stage: each waits for the one before", yticks=[], ylim=(-height, height))
    axes.set_xlim(first - 1, last + 1)
    axes.grid(False)
    # Below the axes: names of launches may stand anywhere in them.
    figure.legend(fontsize=8, loc="outside lower center", ncols=3)
    return figure


def widths(traces: dict[str, StepTrace], title: str) -> Any:
    """How many launches each stage has, for several graphs: what could run side by side.

    Returns:
        The matplotlib figure.
    """
    import matplotlib.pyplot as plt

    figure, all_axes = plt.subplots(len(traces), figsize=(7.2, 1.5 * len(traces) + 0.9), squeeze=False, sharex=True)
    for axes, (name, trace) in zip(all_axes[:, 0], traces.items(), strict=True):
        counts = trace.widths()
        # One outline: a patch for each of a thousand stages takes seconds to draw.
        axes.stairs(counts, [n + 0.5 for n in range(len(counts) + 1)], fill=True, color="C0")
        axes.set_ylabel("launches")
        axes.set_title(f"{name}: {trace.launch_count:,} launches in {trace.stages:,} stages", fontsize=9)
    all_axes[-1, 0].set_xlabel("stage")
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure


def _places(launches: Sequence[Launch], shown: Sequence[int]) -> dict[int, tuple[float, float]]:
    """Column by stage; in a column, top to bottom in the order of what each waits for."""
    columns: dict[int, list[int]] = {}
    for index in shown:
        columns.setdefault(launches[index].stage, []).append(index)
    places: dict[int, tuple[float, float]] = {}
    for stage in sorted(columns):
        members = columns[stage]

        def height(index: int) -> float:
            above = [places[i][1] for i in launches[index].before if i in places]
            return sum(above) / len(above) if above else 0.0

        members.sort(key=lambda i: (-height(i), i))
        top = (len(members) - 1) / 2
        for place, index in enumerate(members):
            places[index] = (float(stage), top - place)
    return places
