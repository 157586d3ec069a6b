"""One table for mechanisms taken away: what was counted, predicted, measured and published, never in one column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from labkit.report import tables
from labkit.report.records import record

MISSING = "-"


class Published(Protocol):
    """A figure in percent that others print, with its machine: `labkit.measure.published.Figure`."""

    value: float
    machine: str


class Measured(Protocol):
    """Where figures come from: `labkit.measure.tables.MeasuredTable`."""

    device: str
    commit: str
    label: str


@dataclass(frozen=True)
class Ablation:
    """The same work without a mechanism and with it.

    Attributes:
        mechanism: what is taken away. size: of the work, "512 rows".
        without_us, with_us: measured microseconds of both sides; None for a side that was not measured.
        counted: what a count gains, as a ratio: bytes, lines, launches. None where nothing countable changes.
        predicted: the gain that was expected of it before any run, as a ratio or a range in words.
        share: of a whole step or prompt, the part that the kernel takes, between 0 and 1, counted.
        published: the gain that others print, of a whole step or prompt.
    """

    mechanism: str
    size: str
    without_us: float | None = None
    with_us: float | None = None
    counted: float | None = None
    predicted: float | str | None = None
    share: float | None = None
    published: Published | None = None

    @property
    def gain(self) -> float | None:
        """Measured time without the mechanism over that with it; None unless both were measured."""
        return self.without_us / self.with_us if self.without_us and self.with_us else None

    @property
    def gain_of_the_whole(self) -> float | None:
        """What the measured gain makes of a step in which the kernel has its share (Amdahl's law)."""
        if self.gain is None or self.share is None:
            return None
        return 1 / (1 - self.share + self.share / self.gain)


def show(title: str, rows: Sequence[Ablation], table: Measured, *, counted: str = "ratio", whole: str = "step") -> None:
    """Show the rows, and record the measured gains, if there are any, with device and commit.

    Args:
        title: of the table and of the record, unique in its notebook.
        rows: in order.
        table: where the microseconds come from.
        counted: what the counts are of: "bytes".
        whole: what a share is of, "decode step" or "prompt".
    """
    machines = {row.published.machine.split(",")[0] for row in rows if row.published}
    columns = [
        *("mechanism", "size", f"counted: {counted}", "predicted: gain"),
        *(f"measured, {table.device}: us without", "us with", "gain"),
        f"predicted: gain of a {whole}",
        f"published, {', '.join(sorted(machines))}: gain of a {whole}",
    ]
    cells = [_cells(row) for row in rows]
    # A column that says nothing in any row is left out.
    kept = [i for i in range(len(columns)) if i < 2 or any(line[i] != MISSING for line in cells)]
    tables.show(f"{title} ({table.label})", [columns[i] for i in kept], [[line[i] for i in kept] for line in cells])
    gains: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.gain is not None:
            gains.setdefault(row.mechanism, {})[row.size] = round(row.gain, 3)
    if gains:
        record(title, basis="measured", device=table.device, commit=table.commit, **gains)


def _cells(row: Ablation) -> list[str]:
    def ratio(value: float | str | None) -> str:
        return MISSING if value is None else value if isinstance(value, str) else f"{value:.2f}"

    us: Callable[[float | None], str] = lambda value: f"{value:,.1f}" if value else "not measured"
    published = 1 + row.published.value / 100 if row.published else None
    return [
        *(row.mechanism, row.size, ratio(row.counted), ratio(row.predicted)),
        *(us(row.without_us), us(row.with_us), ratio(row.gain), ratio(row.gain_of_the_whole), ratio(published)),
    ]
