"""The device's own time of a call, as NVIDIA's CUPTI records it through torch's profiler: no cost of launching in it.

`queued` times many launches from the host's side: what a small kernel needs there is what the host needs to launch it.
Here each call is evaluated and waited for by itself, and its kernels, copies and fills are read from the trace.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a trace's events that occupy the device."""
MARK = "spin_kernel"
"""Part of the name of the kernel that stands before each side in a trace: `torch.cuda._sleep` alone launches it."""
RATES = ("GB/s", "TB/s", "TFLOP/s")
"""Entries of a bench's row that go with one over its time."""

Calls = Sequence[Callable[[], object]]
"""The same work on different buffers. What a call returns is evaluated if it holds MLX arrays; torch has begun it."""


class Event(NamedTuple):
    """What the device did, in microseconds of the trace's clock."""

    begin: float
    end: float
    name: str


@dataclass(frozen=True)
class DeviceTime:
    """Of one call.

    Attributes:
        us: microseconds with at least one of its kernels running (overlapping ones count once, gaps between them do
            not), the median over calls. spread: the longest over the shortest, or None where the trace's kernels do
            not divide evenly among the calls; `us` is then their mean.
        kernels: launches, copies and fills a call.
    """

    us: float
    spread: float | None
    kernels: float


def device_events(trace: Iterable[Mapping[str, Any]]) -> list[Event]:
    """What ran on the device, by its begin, from the events of a trace in Chrome's format."""
    return sorted(Event(e["ts"], e["ts"] + e["dur"], e["name"]) for e in trace if e.get("cat") in ON_DEVICE)


def busy_us(events: Iterable[Event]) -> float:
    """Microseconds with at least one of the events (by their begin) running: the length of their union."""
    busy, end = 0.0, float("-inf")
    for event in events:
        busy += max(0.0, event.end - max(event.begin, end))
        end = max(end, event.end)
    return busy


def time_of(events: Sequence[Event], calls: int) -> DeviceTime:
    """The time of one of `calls` equal calls, which ran one after the other.

    Raises:
        ValueError: no events: the profiler saw nothing of these calls.
    """
    if not events:
        raise ValueError("the trace holds no kernel of these calls: CUPTI saw nothing of them")
    each, rest = divmod(len(events), calls)
    if rest or not each:
        return DeviceTime(busy_us(events) / calls, None, len(events) / calls)
    times = [busy_us(events[i : i + each]) for i in range(0, len(events), each)]
    return DeviceTime(statistics.median(times), max(times) / min(times), each)


def sides_of(events: Iterable[Event]) -> list[list[Event]]:
    """The events after each mark; those before the first mark are dropped."""
    sides: list[list[Event]] = []
    for event in events:
        if MARK in event.name:
            sides.append([])
        elif sides:
            sides[-1].append(event)
    return sides


def profiler() -> Any:
    """torch's profiler of what the device does; begin it with `start()`, end it with `trace_of`."""
    import torch

    torch.cuda.init()
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])


def trace_of(started: Any) -> list[dict]:
    """Stop a profiler: its events, in Chrome's format."""
    started.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        started.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def available() -> bool:
    """Whether MLX and torch both see an NVIDIA GPU here."""
    if mx.metal.is_available() or mx.default_device().type != mx.gpu:
        return False
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def device_times(sides: Mapping[str, Calls], *, launches: int = 24) -> dict[str, DeviceTime]:
    """The device's time of one call of each side, all in one window of the profiler (to open one takes 0.1 s).

    Args:
        sides: the calls of each, over buffers beyond the L2 (`queued.copies_for`).
        launches: calls of a side that are recorded, by turns; at least each of its calls once.

    Returns:
        By side. Without a GPU that MLX and torch both see, or where the profiler fails, nothing; a side that fails is
        printed and left out.
    """
    if not available():
        return {}
    ready = {name: calls for name, calls in sides.items() if calls and _runs(name, calls)}
    counts = {name: max(launches, len(calls)) for name, calls in ready.items()}
    try:
        parts = sides_of(device_events(_recorded(ready, counts)))
        if len(parts) != len(ready):
            raise ValueError(f"the trace holds {len(parts)} marks of {len(ready)}")
        return {name: time_of(part, counts[name]) for name, part in zip(ready, parts, strict=True)}
    except Exception as failure:  # the times with launches must not be lost with those without
        print(f"device's times of {', '.join(ready)}: {type(failure).__name__}: {str(failure)[:300]}")
        return {}


def add_device_times(
    rows: Sequence[tuple[dict, Calls]], beside: Mapping[str, Calls | None] | None = None, *, launches: int = 24
) -> list[dict]:
    """A bench's rows with `device_us` and `device_spread` beside `us`, where the device's time is available.

    Args:
        rows: each with the calls that it timed. Their rates are then those of the device's time.
        beside: what all rows are compared with: "mlx" becomes their `mlx_device_us`.
        launches: as for `device_times`.
    """
    others = {name: calls for name, calls in (beside or {}).items() if calls}
    sides = {f"row {i}: {row['name']}": calls for i, (row, calls) in enumerate(rows)}
    times = device_times({**sides, **others}, launches=launches)
    compared = {f"{name}_device_us": times[name].us for name in others if name in times}
    return [with_device_time(row, times.get(side)) | compared for (row, _), side in zip(rows, sides, strict=True)]


def with_device_time(row: dict, time: DeviceTime | None) -> dict:
    """A row with what the device took, which its rates then follow."""
    if time is None:
        return row
    rates = {key: row[key] * row["us"] / time.us for key in RATES if row.get(key) is not None}
    return {**row, "device_us": time.us, "device_spread": time.spread, **rates}


def _runs(name: str, calls: Calls) -> bool:
    """Whether each call runs: they are compiled by it, and the first buffers fall out of the L2 before their turn."""
    try:
        for call in calls:
            _run(call)
    except Exception as failure:
        print(f"{name} on the device: {type(failure).__name__}: {str(failure)[:300]}")
        return False
    return True


def _run(call: Callable[[], object]) -> None:
    import torch

    mx.eval([leaf for _, leaf in tree_flatten([call()]) if isinstance(leaf, mx.array)])
    mx.synchronize()
    torch.cuda.synchronize()


def _recorded(sides: Mapping[str, Calls], counts: Mapping[str, int]) -> list[dict]:
    import torch

    window = profiler()
    window.start()
    try:
        for name, calls in sides.items():
            torch.cuda._sleep(1000)
            torch.cuda.synchronize()
            for i in range(counts[name]):
                _run(calls[i % len(calls)])
    finally:
        trace = trace_of(window)
    return trace
