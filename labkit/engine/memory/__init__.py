"""The memory guard: a meter, levels with their lines, and what a request will need."""

from labkit.engine.memory.estimates import Estimates
from labkit.engine.memory.guard import Level, Lines, MemoryGuard
from labkit.engine.memory.meter import DeviceMeter, FakeClock, FakeMeter, Meter, Reading, SystemClock

__all__ = [
    "DeviceMeter",
    "Estimates",
    "FakeClock",
    "FakeMeter",
    "Level",
    "Lines",
    "MemoryGuard",
    "Meter",
    "Reading",
    "SystemClock",
]
