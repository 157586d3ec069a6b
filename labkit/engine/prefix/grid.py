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

    def blocks(self, tokens: int) -> int:
        """Whole blocks in so many tokens."""
        return tokens // self.width

    def reusable(self, tokens: int) -> int:
        """Blocks of a prompt that may come from a store: its last token is always fed, for its logits."""
        return max(0, tokens - 1) // self.width

    def on_boundary(self, tokens: int) -> bool:
        """Whether so many tokens are whole blocks."""
        return tokens > 0 and tokens % self.width == 0

    def by_block(self, chunks: Sequence[int]) -> list[tuple[int, ...]]:
        """Chunk widths in order of computation -> the widths within each whole block.

        Raises:
            ValueError: a chunk that crosses the end of a block, or an empty one.
        """
        result, current, filled = [], [], 0
        for chunk in chunks:
            if chunk < 1 or filled + chunk > self.width:
                raise ValueError(f"a chunk of {chunk} tokens at {filled} of a block of {self.width} crosses its end")
            current.append(chunk)
            filled += chunk
            if filled == self.width:
                result.append(tuple(current))
                current, filled = [], 0
        return result
