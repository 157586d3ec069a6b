"""How many rows, from which contexts."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Workload:
    """Requests that are submitted together.

    Attributes:
        name: "equal", "unequal", ...
        contexts: prompt tokens of each row, but for the one that is fed first.
        answer: tokens that each generates.
        prefilled: whether the contexts are there at the start, so that decoding alone is measured.
        temperature, top_p: how tokens are chosen; the most probable one at 0.
    """

    name: str
    contexts: tuple[int, ...]
    answer: int
    prefilled: bool = True
    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def sampling(self) -> dict[str, Any]:
        """Options of a request."""
        return {"temperature": self.temperature, "top_p": self.top_p} if self.temperature else {}

    def sampled(self) -> Workload:
        """The same requests with drawn tokens, as chats have them."""
        return replace(self, temperature=0.8, top_p=0.95)

    @property
    def rows(self) -> int:
        """B."""
        return len(self.contexts)

    @classmethod
    def equal(cls, rows: int, context: int, answer: int, *, prefilled: bool = True) -> Workload:
        """All rows from the same context."""
        return cls("equal", (context,) * rows, answer, prefilled)

    @classmethod
    def unequal(
        cls, rows: int, context: int, answer: int, *, spread: int = 16, grid: int = 32, prefilled: bool = True
    ) -> Workload:
        """Contexts in a geometric row from context / spread to `context`, the longest, in multiples of `grid`."""
        last = max(rows - 1, 1)
        lengths = [context / spread ** (1 - row / last) if rows > 1 else context for row in range(rows)]
        rounded = tuple(max(grid, round(length / grid) * grid) for length in lengths)
        order = list(rounded)
        random.Random(0).shuffle(order)
        return cls("unequal", tuple(order), answer, prefilled)

    def prompts(self, vocabulary: int) -> list[tuple[int, ...]]:
        """Tokens of each row, with one behind the context that decoding begins with."""
        return [
            tuple(random.Random(row).choices(range(min(vocabulary, 1 << 15)), k=context + 1))
            for row, context in enumerate(self.contexts)
        ]
