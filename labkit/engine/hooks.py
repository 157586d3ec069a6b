"""What an engine may be given besides a model: a store of prefixes, a guard of memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from labkit.caches import Cache


class Lease(Protocol):
    """A stored prefix that is held while it is restored.

    Attributes:
        tokens: how many tokens of the prompt it covers, a multiple of the store's grid.
    """

    tokens: int

    def restore(self) -> list[Cache]:
        """Caches that hold these tokens: fresh objects of the serial classes, one a layer."""
        ...

    def release(self) -> None:
        """Nothing more will be asked of it."""
        ...


class PrefixStore(Protocol):
    """States of prompts' beginnings, kept beyond their requests.

    Attributes:
        grid: tokens between boundaries; an engine's chunks end on its multiples.
    """

    grid: int

    def lookup(self, tokens: Sequence[int], extra: Sequence[Any] = ()) -> Lease | None:
        """The longest stored prefix of `tokens`, or None."""
        ...

    def commit(self, tokens: Sequence[int], caches: Sequence[Cache]) -> Any:
        """Offer the state behind `tokens`, whose number is a multiple of the grid."""
        ...


class MemoryGuard(Protocol):
    """Watches memory; asked between steps, in the thread that owns the arrays."""

    def poll(self) -> str:
        """How tight memory is now: "normal", "soft", "hard" or "emergency"."""
        ...

    def chunk_for(self, **sizes: Any) -> int:
        """Prompt tokens that the next chunk may have."""
        ...

    def reclaim(self) -> Any:
        """Give back what nobody uses."""
        ...
