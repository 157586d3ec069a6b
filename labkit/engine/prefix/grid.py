"""The grid: prompts are computed in chunks that end at multiples of one width, whoever computes them.

A chunk of another width rounds differently (other matrix shapes, other splits of the recurrence), so a block that was
computed in other chunks is another block. With one grid, a prompt that begins with stored blocks goes on in the very
chunks that it would have had without a store, and its logits are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """Blocks of `width` tokens."""

    width: int

    def __post_init__(self) -> None:
        if type(self.width) is not int or self.width < 2:
            raise ValueError(f"a block's width must be a whole number of at least 2 tokens, not {self.width!r}")

    def end(self, start: int, limit: int) -> int:
        """Where the chunk that begins at `start` ends: the next multiple of the width, or `limit`."""
        return min(limit, (start // self.width + 1) * self.width)

    def by_block(self, chunks: Sequence[int]) -> list[tuple[int, ...]]:
        """Chunk widths in order of computation -> the widths within each whole block.

        Raises:
            ValueError: a chunk that crosses the end of a block, or an empty one.
        """
        blocks = self._grouped(chunks)
        return blocks if sum(blocks[-1]) == self.width else blocks[:-1]

    def rest(self, chunks: Sequence[int]) -> tuple[int, ...]:
        """The widths behind the last whole block.

        Raises:
            ValueError: as `by_block`.
        """
        last = self._grouped(chunks)[-1]
        return last if sum(last) < self.width else ()

    def _grouped(self, chunks: Sequence[int]) -> list[tuple[int, ...]]:
        """The widths within each block that was begun; at least one group, which may be empty."""
        groups: list[tuple[int, ...]] = [()]
        for chunk in chunks:
            filled = sum(groups[-1])
            if filled == self.width:
                groups.append(())
                filled = 0
            if chunk < 1 or filled + chunk > self.width:
                raise ValueError(f"a chunk of {chunk} tokens at {filled} of a block of {self.width} crosses its end")
            groups[-1] += (chunk,)
        return groups
