"""What the kernels are held to: bounds and verdicts on times that are known, and the lines' work at small sizes."""

from __future__ import annotations

import json
import sys
from functools import partial

import mlx.core as mx
import pytest

from labkit.kernels.device_clock import DeviceTime
from labkit.kernels.gated_delta.recurrence import scan
from recipes.measured import target_lines, targets
from recipes.measured.target_lines import Line, Side


def work(*values: float) -> list[mx.array]:
    return [mx.array(values)]


def sides() -> dict[str, Side]:
    """Twice the work of MLX's op in labkit's call, as where two projections are one launch."""
    mlx = Side([lambda: work(1, 1)], 5e6, launches=4)
    return {"labkit": Side([lambda: work(1, 1)], 10e6), "mlx": mlx, "torch": Side([lambda: None], 5e6, torch=True)}


RATE = Line("a rate", "TB/s", 1.5, 2.5, 4, 3, sides)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Times without a device: microseconds with launches of labkit, MLX and torch, and on the device alone."""
    alone = {"labkit": 4.0, "mlx": 8.0, "torch": 2.5}
    monkeypatch.setattr(targets, "queued", lambda calls, launches, rounds: 10e-6 if launches == 64 else 20e-6)
    monkeypatch.setattr(targets.product, "torch_us", lambda calls, launches: 5.0)
    monkeypatch.setattr(
        targets,
        "device_times",
        lambda recorded, launches: {name: DeviceTime(alone[name], 1.1, 1) for name in recorded if name in alone},
    )
    return alone


def test_rates_are_bounded_from_below_and_times_from_above() -> None:
    time = Line("a time", "ms", 1.5, 0.6, 0.3, 800, sides)
    assert [RATE.verdict(value) for value in (1.4, 1.5, 2.4, 2.5, None)] == [
        *("missed", "at least", "at least", "aim", None)
    ]
    assert [time.verdict(value) for value in (1.6, 1.5, 0.7, 0.6)] == ["missed", "at least", "at least", "aim"]
    assert (RATE.value(4, 10e6), time.value(1250, 1)) == (2.5, 1.25)


def test_a_row_has_both_times_of_every_side_and_a_verdict_of_each(timed: dict[str, float]) -> None:
    first, sides = targets.with_launches(RATE)
    row = targets.on_device(RATE, first, sides)
    assert (first["with_launch"], first["on_device"]) == ("missed", None)
    assert (row["us"], row["value"], row["device_us"], row["device_value"]) == (10, 1, 4, 2.5)
    assert (row["mlx_us"], row["mlx_value"], row["mlx_device_value"]) == (20, 0.25, 0.625)
    assert (row["torch_us"], row["torch_value"], row["torch_device_value"]) == (5, 1, 2)
    assert (row["with_launch"], row["on_device"]) == ("missed", "aim")
    assert row["error"] is None  # other work: other outputs
    assert "0.25 / 0.625" in targets.show(row)
    assert "1 / 2.5" in targets.show(row)


def test_without_the_device_s_times_the_others_stay(timed: dict[str, float]) -> None:
    timed.clear()
    row = targets.on_device(RATE, *targets.with_launches(RATE))
    assert (row["with_launch"], row["on_device"]) == ("missed", None)
    assert "1 / -" in targets.show(row)


def test_lines_fail_alone_and_none_begins_late(
    timed: dict[str, float], monkeypatch: pytest.MonkeyPatch, tmp_path, capsys: pytest.CaptureFixture
) -> None:
    def breaks() -> dict[str, Side]:
        raise RuntimeError("no memory")

    monkeypatch.setattr(targets, "LINES", (Line("broken", "us", 2, 1, 1, 1, breaks), RATE))
    arguments = ["targets", "--out", str(tmp_path), "--commit", "abc", "--name", "here"]
    monkeypatch.setattr(sys, "argv", arguments)
    targets.main()
    table = json.loads((tmp_path / "here_targets.json").read_text())
    assert [row.get("failed", row.get("us")) for row in table["rows"]] == ["RuntimeError: no memory", 10]
    assert "broken" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*arguments, "--seconds", "-1", "rate"])
    targets.main()
    (late,) = json.loads((tmp_path / "here_targets.json").read_text())["rows"]
    assert late == {"name": "a rate", "failed": "not started: time was up"}


@pytest.mark.nightly  # compiles loops for seconds
def test_the_lines_do_what_mlx_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_lines, "copies_for", lambda nbytes: 2)
    monkeypatch.setattr(target_lines.product, "K", 256)
    for made in (
        partial(target_lines._product, 4, 96),
        partial(target_lines._decode, 64),
        partial(target_lines._prefill, 32),
    ):
        found = made()
        assert "torch" not in found
        assert len(found["labkit"].calls) == len(found["mlx"].calls)
        assert targets._difference(found["labkit"], found["mlx"]) < 0.05


@pytest.mark.nightly
def test_experts_and_recurrence_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("EXPERTS", 8), ("HIDDEN", 128), ("INNER", 64), ("TOPK", 2)):
        monkeypatch.setattr(target_lines.grouped, name, size)
    found = target_lines._experts(24, 1.0)
    shapes = [side.calls[0]()[0].shape for side in found.values()]
    assert shapes == [(48, 64), (48, 1, 64)]
    assert found["labkit"].work == 2 * found["mlx"].work == 4 * 48 * 128 * 64
    monkeypatch.setattr(target_lines.delta, "HK", 1)
    monkeypatch.setattr(target_lines.delta, "HV", 2)
    (call,) = target_lines._delta(scan, 8)["labkit"].calls
    first, second = call(), call()
    assert not mx.array_equal(first[1], second[1])  # chained: the second goes on from the first's state
