"""What an engine may be given besides a model and a guard of memory: a store of prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from labkit.caches import Cache
from labkit.caches.extra_keys import ExtraKeys


class Lease(Protocol):
    """A stored prefix that is held while it is restored.

    Attributes:
        tokens: how many tokens of the prompt it covers, a multiple of the store's grid.
        data, token_ids: what lies beside a paused row, and its tokens.
    """

    tokens: int
    data: Any
    token_ids: tuple[int, ...] | None

    def restore(self) -> list[Cache]:
        """Caches that hold these tokens: fresh objects of the serial classes, one a layer."""
        ...

    def release(self) -> None:
        """Nothing more will be asked of it."""
        ...


class PrefixStore(Protocol):
    """States of prompts' beginnings and of paused rows, kept beyond their requests (`labkit.engine.prefix`).

    Attributes:
        grid: tokens between boundaries; an engine's chunks end on its multiples.
        tail: whether the end of a prompt is kept too, off the grid.
    """

    grid: int
    tail: bool

    def lookup(self, tokens: Sequence[int], extra: ExtraKeys = (), chunks: Sequence[int] = ()) -> Lease | None:
        """The longest stored prefix of `tokens`, or None. `extra`: what it depends on besides. `chunks`: the widths it
        was computed in before a park."""
        ...

    def commit(
        self,
        tokens: Sequence[int],
        caches: Sequence[Cache],
        *,
        extra: ExtraKeys = (),
        chunks: Sequence[int] = (),
        last: bool = False,
    ) -> Any:
        """Offer the state behind `tokens`, computed in `chunks`; `last`: the prompt has no boundary behind it."""
        ...

    def pin(self, owner: str, tokens: Sequence[int], extra: ExtraKeys = (), chunks: Sequence[int] = ()) -> int:
        """Keep the longest stored prefix of `tokens` until `unpin`; returns its tokens."""
        ...

    def unpin(self, owner: str) -> bool:
        """Let go."""
        ...

    def save_private(
        self,
        id: str,
        tokens: Sequence[int],
        caches: Sequence[Cache],
        *,
        data: Any = None,
        committed: int = 0,
        extra: ExtraKeys = (),
        chunks: Sequence[int] = (),
    ) -> Any:
        """Store a row exactly, under its id; the result's `stored` says whether."""
        ...

    def load_private(self, id: str) -> Lease | None:
        """The row, or None if it is not whole."""
        ...

    def drop_private(self, id: str) -> None:
        """Forget it."""
        ...

    def private_ids(self) -> list[str]:
        """The rows that no engine holds, of this model."""
        ...
