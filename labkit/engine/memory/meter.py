"""What memory is used: live arrays, the allocator's pool, the process, and what the device has."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import psutil

from labkit import devices

FOOTPRINT_SECONDS = 0.5  # between looks at the process: each costs some 20 us, one at the allocator a quarter of one


@dataclass(frozen=True)
class Reading:
    """Memory at one moment, in bytes.

    Attributes:
        live: arrays in use.
        pool: buffers that the allocator keeps for reuse: available again at the next step boundary.
        footprint: of the whole process where it shares the device's memory, else 0. It sees what the allocator does not
            (the interpreter, other libraries), so the larger of the two counts.
        limit: what the device has.
    """

    live: int
    pool: int
    footprint: int
    limit: int

    @property
    def used(self) -> int:
        """All of it, the pool included."""
        return max(self.live + self.pool, self.footprint)

    @property
    def needed(self) -> int:
        """What would be used still if the pool were given back."""
        return max(self.live, self.footprint - self.pool)


class Meter(Protocol):
    """Measures, in the thread that owns the arrays."""

    def read(self) -> Reading:
        """Memory now."""
        ...

    def reclaim(self) -> None:
        """Give the allocator's pool back; only between steps."""
        ...


class DeviceMeter:
    """The device that MLX computes on.

    Args:
        process: whether the process's footprint counts too, where it shares the device's memory.
    """

    def __init__(self, *, process: bool = True) -> None:
        device = devices.this_device()
        self._limit, self._unified = device.working_set_bytes, process and device.kind != "cuda"
        self._process, self._footprint, self._looked = psutil.Process(), 0, float("-inf")

    def read(self) -> Reading:
        import mlx.core as mx

        if self._unified and (now := time.monotonic()) - self._looked >= FOOTPRINT_SECONDS:
            self._footprint, self._looked = _footprint(self._process), now
        return Reading(mx.get_active_memory(), mx.get_cache_memory(), self._footprint, self._limit)

    def reclaim(self) -> None:
        import mlx.core as mx

        mx.clear_cache()
        self._looked = float("-inf")


class _ResourceUsage(ctypes.Structure):
    """macOS's rusage_info_v0 (sys/resource.h)."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        *((name, ctypes.c_uint64) for name in ("user", "system", "package_wakeups", "interrupt_wakeups", "pageins")),
        *((name, ctypes.c_uint64) for name in ("wired", "resident", "footprint", "started", "exited")),
    )


def _footprint(process: psutil.Process) -> int:
    """The process's own memory: macOS's physical footprint, which counts what Metal holds, elsewhere the resident set.

    On Linux the resident set counts files that are mapped; labkit reads its weights, it does not map them.
    """
    if sys.platform == "darwin":
        usage = _ResourceUsage()
        if ctypes.CDLL(None).proc_pid_rusage(process.pid, 0, ctypes.byref(usage)) == 0:
            return int(usage.footprint)
    return int(process.memory_info().rss)


class FakeMeter:
    """Memory as a test says, or as a script says by the number of the reading.

    Attributes:
        limit, live, pool, footprint: what the next reading tells; `live` may be a function.
        outside: bytes beside `live`, a number or a function of the number of readings so far.
        readings, reclaims: how often it was asked.
    """

    def __init__(
        self,
        limit: int,
        live: int | Callable[[], int] = 0,
        *,
        pool: int = 0,
        footprint: int = 0,
        outside: int | Callable[[int], int] = 0,
    ):
        self.limit, self.live, self.pool, self.footprint, self.outside = limit, live, pool, footprint, outside
        self.readings = self.reclaims = 0

    def read(self) -> Reading:
        self.readings += 1
        live = self.live() if callable(self.live) else self.live
        outside = self.outside(self.readings) if callable(self.outside) else self.outside
        return Reading(live + outside, self.pool, self.footprint, self.limit)

    def reclaim(self) -> None:
        self.reclaims += 1
        self.footprint = max(0, self.footprint - self.pool)
        self.pool = 0


class SystemClock:
    """Seconds of the system."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


class FakeClock(SystemClock):
    """Seconds as a test says; sleeping takes no time and moves the clock."""

    def __init__(self, now: float = 0.0):
        self.time = now

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
