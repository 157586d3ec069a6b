"""The bench of paged attention at small sizes: every way has its row, and the default's row says what it is worth."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

from labkit.kernels.attention import paged_bench
from labkit.kernels.attention.paged_bench import DEFAULT, GATHERING, ONE_BUFFER
from labkit.kernels.device_clock import DeviceTime


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two short rows of one KV head, two rounds of three calls."""
    sizes = {"PROBLEMS": (("two rows", (70, 9), 30),), "HEADS": 2, "KV_HEADS": 1, "WIDTH": 64, "ROOM": 64}
    for name, value in {**sizes, "PAGES": (16, 8), "LAUNCHES": 3, "ROUNDS": 2}.items():
        monkeypatch.setattr(paged_bench, name, value)
    monkeypatch.setattr(paged_bench, "copies_for", lambda nbytes: 2)


def test_every_way_has_a_row_and_kernels_run_outside_of_the_cpu_s_stream(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Inside it a GPU's kernels are refused: MLX's default device is then the CPU."""
    inside, stream, decode_rows = [], mx.stream, paged_bench.decode_rows

    class Watched:
        def __init__(self, where: object) -> None:
            self.context = stream(where)

        def __enter__(self) -> None:
            inside.append(self.context.__enter__())

        def __exit__(self, *raised: object) -> None:
            inside.pop()
            self.context.__exit__(*raised)

    def on_the_device(*arguments: object, **options: object) -> mx.array:
        assert not inside, "a kernel is called where the default device is the CPU"
        return decode_rows(*arguments, **options)

    monkeypatch.setattr(mx, "stream", Watched)
    monkeypatch.setattr(paged_bench, "decode_rows", on_the_device)
    rows = {row["name"]: row for row in paged_bench.rows()}
    assert capsys.readouterr().out == ""
    paged = ["pages of 16", "pages of 8", "pages of 16, lanes", "pages of 16, uneven cut"]
    assert set(rows) == {*paged, ONE_BUFFER, *GATHERING, "one buffer, lanes"}
    assert next(iter(rows)) == DEFAULT
    assert all(rows[name]["relative_error"] < 0.02 for name in paged)
    assert rows[DEFAULT]["times_of_paged"] == 1
    median, least, most = rows[DEFAULT]["times_of_one_buffer"]
    assert least <= median <= most
    assert least <= 1 / rows[ONE_BUFFER]["most"] * (1 + 1e-9)
    assert rows[DEFAULT]["gathering_times"][0] == min(rows[name]["times_of_paged"] for name in GATHERING)


def test_each_call_waits_for_the_one_before_it(small: None) -> None:
    seen: list[mx.array] = []

    def way(one: tuple[mx.array, ...]) -> mx.array:
        seen.append(one[0])
        return one[0] + one[1]

    sets = [(mx.array([1.0]), mx.array([10.0])), (mx.array([2.0]), mx.array([100.0]))]
    times = paged_bench._alternating({"added": (way, sets), "broken": (_raises, sets)})
    assert list(times) == ["added"]
    assert len(times["added"]) == 2
    assert [query.item() for query in seen[:3]] == [1, 11, 111]


def _raises(one: tuple[mx.array, ...]) -> mx.array:
    raise RuntimeError("no room")


def test_the_answers_are_ratios_of_one_round_and_of_the_device(small: None) -> None:
    times = {DEFAULT: [2.0, 3.0, 4.0], ONE_BUFFER: [2.0, 2.0, 2.0]}
    times |= {GATHERING[0]: [8.0, 9.0, 8.0], GATHERING[1]: [2.0, 60.0, 80.0]}
    alone = dict(zip([DEFAULT, ONE_BUFFER, *GATHERING], map(_device, (5, 4, 20, 30)), strict=True))
    answers = paged_bench._answers(times, alone)
    assert answers["times_of_one_buffer"] == [1.5, 1, 2]
    assert answers["gathering_times"] == [3, 2, 4]
    assert (answers["device_times_of_one_buffer"], answers["device_gathering_times"]) == (1.25, 4)
    assert set(paged_bench._answers(times, {})) == {"times_of_one_buffer", "gathering_times"}


def _device(us: float) -> DeviceTime:
    return DeviceTime(us, 1.0, 2)


def test_a_problem_that_fails_is_named_and_the_next_begins(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    problems: list[str] = []

    def problem(label: str, lengths: tuple[int, ...], predicted: float) -> Callable:
        problems.append(label)
        if label == "broken":
            raise RuntimeError("no memory")
        return iter([{"name": label}])

    monkeypatch.setattr(paged_bench, "PROBLEMS", (("broken", (9,), 1), ("sound", (9,), 1)))
    monkeypatch.setattr(paged_bench, "_problem", problem)
    assert list(paged_bench.rows()) == [{"name": "sound"}]
    assert "broken: RuntimeError: no memory" in capsys.readouterr().out
    assert list(paged_bench.rows(deadline=-1)) == []
