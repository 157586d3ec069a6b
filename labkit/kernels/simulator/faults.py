"""What the simulator's checks find, in words that name kernel, line, thread and element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RACE_IN_SIMDGROUP = "race-in-simdgroup"
RACE_BETWEEN_SIMDGROUPS = "race-between-simdgroups"
RACE_BETWEEN_THREADGROUPS = "race-between-threadgroups"
OUT_OF_BOUNDS_READ = "out-of-bounds-read"
OUT_OF_BOUNDS_WRITE = "out-of-bounds-write"
UNINITIALISED_READ = "uninitialised-read"
WRITE_TO_INPUT = "write-to-input"
DIVERGENT_BARRIER = "divergent-barrier"
BARRIER_AFTER_EXIT = "barrier-after-exit"
DIVERGENT_SIMD = "divergent-simd"
INACTIVE_LANE = "inactive-lane"
MISALIGNED = "misaligned"
DEADLOCK = "deadlock"
CRASH = "crash"
STOPPED = "stopped"
UNWRITTEN_OUTPUT = "unwritten-output"
THREADGROUP_MEMORY = "threadgroup-memory"
TOO_MANY_THREADS = "too-many-threads"

# In the order of FaultKind in cpp/runtime/interface.h.
RUNTIME_KINDS = (
    "",
    RACE_IN_SIMDGROUP,
    RACE_BETWEEN_SIMDGROUPS,
    RACE_BETWEEN_THREADGROUPS,
    OUT_OF_BOUNDS_READ,
    OUT_OF_BOUNDS_WRITE,
    UNINITIALISED_READ,
    WRITE_TO_INPUT,
    DIVERGENT_BARRIER,
    BARRIER_AFTER_EXIT,
    DIVERGENT_SIMD,
    INACTIVE_LANE,
    MISALIGNED,
    DEADLOCK,
    CRASH,
    STOPPED,
)


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a kernel.

    Attributes:
        kind: one of this module's names, such as "race-between-simdgroups".
        kernel: the kernel's name.
        line: the line of its Metal text, from 1; 0 if it belongs to none.
        in_header: whether `line` counts in the header instead of the source.
        text: that line.
        thread: the thread's index in its threadgroup, or None.
        threadgroup: the threadgroup's index in the grid, or None.
        memory: the buffer or threadgroup array, or "".
        element: index in `memory` of the first element touched, in elements (threadgroup arrays: in bytes), or None.
        other_thread, other_line: the other party of a race or divergence, or None; other_in_header as in_header.
        count: how often this happened at this instruction.
        message: the whole story in a sentence.
    """

    kind: str
    kernel: str
    message: str
    line: int = 0
    in_header: bool = False
    text: str = ""
    thread: int | None = None
    threadgroup: int | None = None
    memory: str = ""
    element: int | None = None
    other_thread: int | None = None
    other_line: int | None = None
    other_in_header: bool = False
    count: int = 1

    def __str__(self) -> str:
        where = f" at {'header ' if self.in_header else ''}line {self.line}" if self.line else ""
        times = f" ({self.count} times)" if self.count > 1 else ""
        code = f"\n    {self.line:4d} | {self.text.strip()}" if self.text else ""
        return f"{self.kernel}: {self.kind}{where}: {self.message}{times}{code}"


class KernelFault(RuntimeError):
    """A launch that the simulator had to stop, or that was asked to raise on faults. `faults` holds them all."""

    def __init__(self, faults: Sequence[Fault]):
        self.faults = tuple(faults)
        super().__init__("\n".join(str(fault) for fault in self.faults))
