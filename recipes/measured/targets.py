"""What the kernels are held to on an H200: each in its chosen configuration, beside MLX's op and torch's, in one run.

    python -m recipes.measured.targets --out data/measured --commit SHA [--seconds 150] [LINE ...]

A row has microseconds with launches inside (`us`, of many queued launches) and on the device alone (`device_us`), the
same of MLX's op and of torch's, and says of both whether the bound is met. All times with launches are taken first, so
that no profiler is near them. Each row is written as soon as it is there, and again with its times on the device.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import mlx.core as mx

from labkit.kernels.device_clock import device_times
from labkit.kernels.quantized_matmul import bench as product
from labkit.kernels.queued import queued
from recipes.measured.table import Table
from recipes.measured.target_lines import LINES, Line, Side

Sides = dict[str, Side]


def with_launches(line: Line) -> tuple[dict, Sides]:
    """A line's row with launches inside, and the sides that ran; one that fails is printed and left out.

    Raises:
        RuntimeError: labkit's own failed.
    """
    sides = line.sides()
    took = {name: product.attempt(f"{line.name}: {name}", partial(_with_launch, side)) for name, side in sides.items()}
    ran = {name: side for name, side in sides.items() if took[name]}
    if "labkit" not in ran:
        raise RuntimeError("labkit's kernel did not run")
    row = {key: getattr(line, key) for key in ("name", "unit", "at_least", "aim", "floor", "predicted_us")}
    row |= {"error": _difference(ran["labkit"], ran["mlx"])} if "mlx" in ran else {}
    for name, side in ran.items():
        row |= {f"{_prefix(name)}us": took[name], f"{_prefix(name)}value": line.value(took[name], side.work)}
    return row | {"with_launch": line.verdict(row["value"]), "on_device": None}, ran


def on_device(line: Line, row: dict, sides: Sides) -> dict:
    """The row with the device's own times, where they can be had."""
    recorded = {name: side.calls for name, side in sides.items() if side.recorded}
    alone = device_times(recorded, launches=min(24, 2 * sides["labkit"].launches))
    for name, time_ in alone.items():
        value = line.value(time_.us, sides[name].work)
        row = row | {f"{_prefix(name)}device_{key}": v for key, v in (("us", time_.us), ("value", value))}
        row[f"{_prefix(name)}device_spread"] = time_.spread
    return row | {"on_device": line.verdict(row.get("device_value"))}


def _prefix(side: str) -> str:
    return "" if side == "labkit" else f"{side}_"


def _with_launch(side: Side) -> float:
    """Microseconds of a call when many are queued."""
    if side.torch:
        return product.torch_us(side.calls, launches=side.launches)
    return 1e6 * queued(side.calls, launches=side.launches, rounds=1 if side.launches == 1 else 5)


def _difference(ours: Side, mlx: Side) -> float | None:
    """Norm of the difference of both first outputs over MLX's norm, where they are the same thing."""
    got, want = (side.calls[0]()[0].astype(mx.float32).flatten() for side in (ours, mlx))
    if ours.work != mlx.work or got.size != want.size or not mlx.recorded:
        return None
    return (mx.linalg.norm(got - want) / mx.linalg.norm(want)).item()


def rows(lines: Sequence[Line], deadline: float) -> Iterator[dict]:
    """A row a line, then the rows again with the device's times; nothing begins after the deadline (on
    `time.perf_counter`)."""
    timed: list[tuple[Line, dict, Sides]] = []
    for line in lines:
        if time.perf_counter() > deadline:
            yield {"name": line.name, "failed": "not started: time was up"}
            continue
        try:
            timed.append((line, *with_launches(line)))
            yield timed[-1][1]
        except Exception as failure:  # a line that fails must not hide the others
            traceback.print_exc()
            yield {"name": line.name, "failed": f"{type(failure).__name__}: {failure}"[:300]}
    for line, row, sides in timed:
        if time.perf_counter() < deadline:
            yield on_device(line, row, sides)


def show(row: dict) -> str:
    """A row as one line of text: with launches inside / on the device alone."""
    if "failed" in row:
        return f"{row['name']:31s} failed: {row['failed']}"

    def both(prefix: str) -> str:
        pair = (row.get(f"{prefix}{key}") for key in ("value", "device_value"))
        return " / ".join("-" if value is None else f"{value:.3g}" for value in pair)

    figures = "  ".join(f"{who} {both(key):>15s}" for who, key in (("MLX", "mlx_"), ("torch", "torch_"), ("ours", "")))
    bounds = f"at least {row['at_least']:g}, aim {row['aim']:g}, floor {row['floor']:g} {row['unit']}"
    times = f"{row['us']:.1f} / {row.get('device_us') or float('nan'):.1f} us, predicted {row['predicted_us']:.0f}"
    return f"{row['name']:31s} {figures}  {bounds}: {row['with_launch']} / {row['on_device']} ({times})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", nargs="*", help="parts of lines' names; all without")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--seconds", type=float, default=130, help="no line begins after these")
    parser.add_argument("--name", default="h200", help="prefix of the file")
    arguments = parser.parse_args()
    found: dict[str, dict] = {}
    table = Table(arguments.out / f"{arguments.name}_targets.json", arguments.commit, family="targets")
    chosen = [line for line in LINES if not arguments.lines or any(part in line.name for part in arguments.lines)]
    print("with launches inside / on the device alone", flush=True)
    for row in rows(chosen, time.perf_counter() + arguments.seconds):
        found[row["name"]] = row
        table.rows = list(found.values())
        table.write()
        table.say(show(row))


if __name__ == "__main__":
    main()
