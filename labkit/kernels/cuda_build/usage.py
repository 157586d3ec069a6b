"""What a compiled kernel takes of a multiprocessor: registers, spills, shared memory, and how many fit."""

from __future__ import annotations

import re
from dataclasses import dataclass

REGISTERS, THREADS, GROUPS, SHARED = 65536, 2048, 32, 233472
"""Of one multiprocessor of compute capability 9.0: registers, threads, threadgroups, bytes of shared memory."""

RESERVED = 1024
"""Bytes of shared memory that the system takes of each threadgroup's share."""


@dataclass(frozen=True)
class Usage:
    """What the assembler says of a kernel.

    Attributes:
        registers: of each thread. stack: bytes of each thread's own memory, for arrays that are indexed at run time.
        spill_stores, spill_loads: bytes that each thread moves to and from memory for want of registers.
        shared: bytes of a threadgroup's memory.
    """

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int

    def groups(self, threads: int) -> int:
        """How many threadgroups of `threads` threads a multiprocessor holds at once."""
        warps = -(-threads // 32)
        # Registers go out to warps in steps of 256.
        by_registers = REGISTERS // (-(-self.registers // 8) * 8 * 32 * warps)
        by_shared = SHARED // (-(-self.shared // 128) * 128 + RESERVED)
        return min(by_registers, by_shared, THREADS // (32 * warps), GROUPS)

    def occupancy(self, threads: int) -> float:
        """The share of a multiprocessor's threads that live at once."""
        return self.groups(threads) * -(-threads // 32) * 32 / THREADS


def usage(log: str) -> Usage:
    """Read the assembler's log of one kernel.

    Raises:
        ValueError: it tells nothing of a kernel.
    """
    used = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if not used or not spills:
        raise ValueError(f"no kernel in the assembler's log: {log[-500:]!r}")
    shared = re.search(r"(\d+) bytes smem", log)
    return Usage(int(used.group(1)), *map(int, spills.groups()), int(shared.group(1)) if shared else 0)
