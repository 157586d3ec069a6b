"""How decode attention shares its columns among threadgroups, and how many simdgroups take one part.

H200, 16/2 heads of 256, launches in a CUDA graph with their merges, one threadgroup of eight simdgroups on each
multiprocessor or two of four (`decode_simds`):

| columns | one of eight | two of four |
| --- | --- | --- |
| 4K | 9.4 us | 9.1 us |
| 32K | 22.9 us | 23.6 us |
| 128K | 67.5 us | 68.7 us |
"""

from __future__ import annotations

from typing import Literal

Form = Literal["lanes", "tensor"]

BLOCK = 512
"""Columns of a block in the fixed-block layout."""

DECODE_THREADGROUPS = 132
"""Threadgroups of decode attention: one on each multiprocessor of an H200, though two of four simdgroups fit. Half the
parts are half the partial results to write and merge."""

FEWEST_COLUMNS = 128
"""Columns below which a part is not worth its merge."""


def parts_for(rows: int, kv_heads: int, group: int, columns: int) -> int:
    """Parts in the general layout: as many threadgroups as fill the device, none with fewer than `FEWEST_COLUMNS`."""
    threadgroups = rows * kv_heads * -(-group // 8)
    return max(1, min(DECODE_THREADGROUPS // threadgroups, -(-columns // FEWEST_COLUMNS)))


def decode_simds(form: Form, threadgroups: int, block: int) -> int:
    """Simdgroups of a threadgroup of decode attention. Eight of form "tensor" fill a multiprocessor with registers:
    right where each has one threadgroup at most. In blocks, sums may not depend on how many threadgroups there are."""
    return 8 if form == "tensor" and block == 0 and threadgroups <= DECODE_THREADGROUPS else 4


def uneven_block(kv_heads: int, group: int, columns: int) -> int:
    """Columns of a block in the uneven layout: one row of `columns` fills the device, and no block is so small that its
    partial sums, fp32 for each query head, are more than a sixteenth of its keys and values."""
    parts = max(1, DECODE_THREADGROUPS // (kv_heads * -(-group // 8)))
    return max(256, -(-columns // parts // 16) * 16)
