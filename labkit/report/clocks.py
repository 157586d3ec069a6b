"""A bench's times twice: as the host sees many launches, and on the device alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from labkit.report import tables

INSIDE, ALONE = "launch cost inside", "on the device alone"
WHOSE = {"": "", "mlx_": "MLX, ", "torch_": "torch, "}
MISSING = "-"


class Measured(Protocol):
    """Where figures come from: `labkit.measure.tables.MeasuredTable`."""

    label: str

    def __iter__(self) -> Iterable[Mapping[str, Any]]: ...


def show(table: Measured, *names: str) -> None:
    """Show microseconds of the fastest configuration of each kernel and shape, by both clocks.

    Nothing is shown of a table without times on the device alone: launch cost is then inside all of its times.

    Args:
        table: with rows of `name`, `shape`, `us` and, where measured, `device_us`; `mlx_us`, `torch_us` likewise.
        names: what a row's name must begin with, one of these; all rows without.
    """
    chosen: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in table:
        key = row["name"], row.get("shape", "")
        fits = row.get("device_us") and (not names or row["name"].startswith(names))
        if fits and (key not in chosen or row["device_us"] < chosen[key]["device_us"]):
            chosen[key] = row
    if not chosen:
        return
    columns = {
        f"{prefix}{unit}": f"{who}{clock}: us"
        for prefix, who in WHOSE.items()
        for unit, clock in (("us", INSIDE), ("device_us", ALONE))
        if any(row.get(f"{prefix}{unit}") for row in chosen.values())
    }
    lines = [[*key, *(_cell(row.get(column)) for column in columns)] for key, row in chosen.items()]
    tables.show(f"Measured by both clocks ({table.label})", ["kernel", "shape", *columns.values()], lines)


def _cell(us: float | None) -> str:
    return f"{us:,.1f}" if us else MISSING
