"""The device's own time of a call: read from a trace whose answers are known, and taken in one window for several."""

from __future__ import annotations

import types

import mlx.core as mx
import pytest

from labkit.kernels import device_clock
from labkit.kernels.device_clock import Event, add_device_times, busy_us, device_events, device_times, sides_of, time_of


def event(ts: float, dur: float, name: str = "k", cat: str = "kernel") -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


TRACE = [
    event(9, 1, "before any mark"),
    event(100, 5, "void at::native::spin_kernel(long)"),
    event(0, 1000, "cudaGraphLaunch", "cuda_runtime"),
    {"ph": "M", "name": "process_name"},
    event(130, 4, "second", "gpu_memset"),
    event(110, 4, "first"),
    event(113, 3, "beside first", "gpu_memcpy"),
    event(128, 2, "first"),
    event(200, 5, "at::cuda::spin_kernel"),
    event(210, 7, "other"),
]


def test_only_what_runs_on_the_device_counts_in_the_order_of_time() -> None:
    assert [each.begin for each in device_events(TRACE)] == [9, 100, 110, 113, 128, 130, 200, 210]


def test_overlaps_count_once_and_gaps_not_at_all() -> None:
    assert busy_us([Event(0, 4, "a"), Event(1, 2, "b"), Event(3, 6, "c"), Event(10, 11, "d")]) == 7
    assert busy_us([]) == 0


def test_a_mark_stands_before_each_side() -> None:
    first, second = sides_of(device_events(TRACE))
    assert [each.name for each in first] == ["first", "beside first", "first", "second"]
    assert [each.name for each in second] == ["other"]


def test_a_call_takes_the_median_of_its_kernels_unions() -> None:
    first, second = sides_of(device_events(TRACE))
    assert time_of(first, 2) == device_clock.DeviceTime(6, 1, 2)
    assert time_of(second, 1) == device_clock.DeviceTime(7, 1, 1)
    three = [Event(0, 1, ""), Event(10, 12, ""), Event(20, 26, "")]
    assert time_of(three, 3) == device_clock.DeviceTime(2, 6, 1)
    # Kernels that do not divide among the calls: the mean, and no spread to speak of.
    assert time_of(three, 2) == device_clock.DeviceTime(4.5, None, 1.5)
    with pytest.raises(ValueError, match="CUPTI saw nothing"):
        time_of([], 2)


class FakeDevice:
    """Stands for torch: what is called while the profiler runs takes the time that `takes` says, on its own clock."""

    def __init__(self) -> None:
        self.now, self.trace, self.windows, self.recording = 0.0, [], 0, False
        self.cuda = types.SimpleNamespace(
            init=lambda: None,
            is_available=lambda: True,
            synchronize=lambda: None,
            _sleep=lambda cycles: self.takes(1, "spin_kernel"),
        )
        self.profiler = types.SimpleNamespace(
            profile=lambda activities: self, ProfilerActivity=types.SimpleNamespace(CUDA="cuda")
        )

    def takes(self, us: float, name: str = "kernel") -> None:
        self.trace += [event(self.now, us, name)] if self.recording else []
        self.now += us + 10

    def start(self) -> None:
        self.windows, self.recording, self.trace = self.windows + 1, True, []

    def stop(self) -> None:
        self.recording = False

    def export_chrome_trace(self, path: str) -> None:
        with open(path, "w") as file:
            device_clock.json.dump({"traceEvents": self.trace}, file)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setitem(__import__("sys").modules, "torch", fake)
    monkeypatch.setattr(device_clock, "available", lambda: True)
    return fake


def test_one_window_serves_several_sides(device: FakeDevice) -> None:
    seen = []

    def call(index: int) -> list[mx.array]:
        seen.append(index)
        device.takes(2 + index)
        return [mx.zeros(1)]

    def fails() -> None:
        raise RuntimeError("no such kernel here")

    ours = [lambda i=i: call(i) for i in range(3)]
    found = device_times({"ours": ours, "broken": [fails], "torch": [lambda: device.takes(40)]}, launches=2)
    assert device.windows == 1
    assert set(found) == {"ours", "torch"}
    # Each buffer has its turn, though fewer launches were asked for; once before, to compile.
    assert seen == [0, 1, 2] * 2
    assert (found["ours"].us, found["ours"].spread, found["torch"].us) == (3, 2, 40)


def test_rows_get_the_devices_time_and_its_rates(device: FakeDevice) -> None:
    rows = [
        ({"name": "a", "us": 8.0, "GB/s": 100.0, "TFLOP/s": None, "mlx_us": 12.0}, [lambda: device.takes(4)]),
        ({"name": "a", "us": 9.0}, [lambda: device.takes(6)]),
    ]
    first, second = add_device_times(rows, {"mlx": [lambda: device.takes(10)], "torch": None})
    assert first == {
        **{"name": "a", "us": 8.0, "GB/s": 200.0, "TFLOP/s": None, "mlx_us": 12.0},
        **{"device_us": 4, "device_spread": 1, "mlx_device_us": 10},
    }
    assert (second["device_us"], second["mlx_device_us"]) == (6, 10)


def test_a_trace_that_lost_its_marks_gives_no_time(device: FakeDevice, capsys: pytest.CaptureFixture) -> None:
    device.cuda._sleep = lambda cycles: None
    row = {"name": "a", "us": 8.0}
    assert add_device_times([(row, [lambda: device.takes(4)])]) == [row]
    assert "0 marks of 1" in capsys.readouterr().out


def test_without_a_gpu_rows_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_clock, "available", lambda: False)
    row = {"name": "a", "us": 8.0, "GB/s": 100.0}
    assert add_device_times([(row, [lambda: pytest.fail("nothing runs twice for nothing")])]) == [row]
    assert device_clock.device_times({"ours": [lambda: None]}) == {}
