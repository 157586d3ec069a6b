"""The in-place rule: how a buffer that outlives a step grows or changes without being copied.

MLX has no in-place write for a custom kernel: it reads inputs and makes new outputs, and MLX orders launches by their
outputs alone. Writing through an input is a fault that check mode reports. MLX's own `slice_update` writes in place
only where the back end lets it (Metal and the CPU, when nobody else holds the buffer); on CUDA, MLX 0.32 copies the
whole buffer for every append: 670 to 820 us for 134 MB on an H200, however small the appended row.

So every kernel and cache here follows one rule:

1. A kernel returns its new state as an output. What it keeps must be as small as what it changes (a recurrent state:
   63 MB at the full shape, read and written once each step).
2. A buffer that grows is a list of fixed segments and one small tail (`Segments`). Appending touches the tail alone;
   a full tail becomes a segment, by reference. The price of an append is bounded by the tail's size, on every back
   end.
3. A kernel that reads such a buffer takes the segments in one array where they are pages of a pool, or is launched on
   segments and tail, and merges; it gets lengths on the device, so that its shape does not change from step to step.
4. Nobody but the owner keeps a reference to the tail: then the back ends that can, write it in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx


@dataclass
class Segments:
    """A buffer [..., length, width] that grows along its second last axis, in segments of fixed length.

    Attributes:
        segment_length: rows of a segment, and of the tail's capacity.
        full: the full segments [..., segment_length, width], never written again.
        tail: [..., segment_length, width]; its first `tail_length` rows count.
        copied_bytes: what appends have moved so far, at most: the appended rows, and the tail for each append.
    """

    segment_length: int
    full: list[mx.array] = field(default_factory=list)
    tail: mx.array | None = None
    tail_length: int = 0
    copied_bytes: int = 0

    def __post_init__(self):
        if self.segment_length < 1:
            raise ValueError(f"segment_length must be at least 1, not {self.segment_length}")

    def __len__(self) -> int:
        return len(self.full) * self.segment_length + self.tail_length

    def append(self, rows: mx.array) -> None:
        """Add rows [..., n, width], n of any size.

        Raises:
            ValueError: rows of another shape or dtype than those before.
        """
        if rows.ndim < 2:
            raise ValueError(f"rows need shape [..., n, width], not {rows.shape}")
        if self.tail is None:
            self.tail = mx.zeros((*rows.shape[:-2], self.segment_length, rows.shape[-1]), dtype=rows.dtype)
        expected = (*self.tail.shape[:-2], rows.shape[-2], self.tail.shape[-1])
        if rows.shape != expected or rows.dtype != self.tail.dtype:
            raise ValueError(f"rows need shape {expected} and dtype {self.tail.dtype}, not {rows.shape} {rows.dtype}")
        taken = 0
        while taken < rows.shape[-2]:
            count = min(rows.shape[-2] - taken, self.segment_length - self.tail_length)
            self._fill(rows[..., taken : taken + count, :])
            taken += count

    def rows(self) -> mx.array:
        """Everything in one array [..., length, width]: a copy of the whole, for readers without segments."""
        if self.tail is None:
            raise ValueError("nothing was appended yet: the shape is not known")
        return mx.concatenate([*self.full, self.tail[..., : self.tail_length, :]], axis=-2)

    def _fill(self, rows: mx.array) -> None:
        count = rows.shape[-2]
        if count == self.segment_length:  # a whole segment needs no tail
            self.full.append(mx.contiguous(rows))
            self.copied_bytes += rows.nbytes
            return
        end = self.tail_length + count
        self.tail[..., self.tail_length : end, :] = rows
        self.tail_length = end
        self.copied_bytes += self.tail.nbytes + rows.nbytes
        if end == self.segment_length:
            self.full.append(self.tail)
            self.tail, self.tail_length = mx.zeros_like(self.tail), 0
