"""A file in memory, as records are written to it and read from it."""

from __future__ import annotations

from collections.abc import Sequence


class MemoryFile:
    """Bytes with a file system's two requests.

    Attributes:
        data: what it holds.
        order: where each write began.
    """

    def __init__(self, data: bytes | int):
        """`data`: the bytes, or how many zeros."""
        self.data, self.order = bytearray(data), []

    def put(self, parts: Sequence[bytes | memoryview], offset: int) -> None:
        """Write parts, one behind the other."""
        self.order.append(offset)
        for part in parts:
            self.data[offset : offset + len(part)] = part
            offset += len(part)

    def fill(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Read to buffers, one behind the other; less, silently, where the file ends."""
        for buffer in buffers:
            there = self.data[offset : offset + len(buffer)]
            buffer[: len(there)] = there
            offset += len(buffer)
