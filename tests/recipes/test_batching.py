"""The sweep's protocol: no side's first turn is its first run."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit.measure.batching import Workload
from recipes.measured import batching


class Silent:
    """A side that only notes what it is told to run."""

    def __init__(self, name: str, told: list[tuple[str, int]]):
        self.name, self.told = name, told

    def run(self, workload: Workload) -> None:
        self.told.append((self.name, workload.answer))


def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, told: list[tuple[str, int]]) -> batching.Sweep:
    """A sweep on a device of this kind whose measured turns are noted as "turn", and whose clock steps by 0.2 s."""
    arguments = argparse.Namespace(out=tmp_path, commit="abc", name="here", model="some", seconds=1)
    one = batching.Sweep(arguments)
    one.subject, one.rates = SimpleNamespace(costs=None), None
    now = iter(range(1000))
    monkeypatch.setattr(batching, "this_device", lambda: SimpleNamespace(kind=kind))
    monkeypatch.setattr(batching.time, "perf_counter", lambda: 0.2 * next(now))

    def measured(sides: list[Silent], workload: Workload, **options: object) -> SimpleNamespace:
        told.extend(("turn", workload.answer) for _ in sides)
        point = {"as_rows": lambda: [{}], "median": lambda *_: 1.0, "ratio": lambda *_: (1, 1, 1)}
        return SimpleNamespace(**point, floor=1.0, load=0.0)

    monkeypatch.setattr(batching, "sweep_point", measured)
    return one


def test_on_a_cpu_each_side_warms_up_for_a_turn_before_its_first(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int]] = []
    one = sweep(tmp_path, monkeypatch, "cpu", told)
    ours, theirs = Silent("ours", told), Silent("theirs", told)
    workload = Workload.equal(1, 64, 12)
    one.point("first", workload, [ours], 1)
    assert told == [("ours", 6), ("ours", 6), ("turn", 12)]  # 0.4 s of runs of 0.2 s, for a turn of 0.3
    told.clear()
    one.point("second", workload, [ours, theirs], 1)
    assert told == [("theirs", 6), ("theirs", 6), ("turn", 12), ("turn", 12)]


def test_on_a_gpu_every_point_compiles_before_it_is_measured(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int]] = []
    one = sweep(tmp_path, monkeypatch, "cuda", told)
    ours = Silent("ours", told)
    for rows in (1, 8):
        one.point(f"B={rows}", Workload.equal(rows, 64, 12), [ours], 1)
    assert told == [("ours", 6), ("turn", 12)] * 2
