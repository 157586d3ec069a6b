"""What a lookup hands out: bytes that are there and sound, for as long as somebody holds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from labkit.caches import Cache
from labkit.engine.prefix.codec import Codec
from labkit.engine.prefix.record import Record


class Lease:
    """A stored prefix. Its bytes cannot be evicted, overwritten or found damaged any more.

    Attributes:
        tokens: how many tokens it covers.
        data: what was stored beside a private chain, JSON data; None for a shared prefix.
        token_ids: the tokens themselves, of a private chain.
    """

    def __init__(
        self,
        codec: Codec,
        blocks: Sequence[Record],
        state: Record | None,
        tokens: int,
        *,
        on_release: Callable[[], None],
        data: Any = None,
        token_ids: tuple[int, ...] | None = None,
        landed: dict[str, mx.array] | None = None,
    ):
        self.tokens, self.data, self.token_ids = tokens, data, token_ids
        self._codec, self._blocks, self._state, self._on_release = codec, blocks, state, on_release
        self._landed = landed or {}

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        records = {id(record): record for record in (*(self._blocks or ()), self._state) if record is not None}
        return sum(record.nbytes for record in records.values())

    def restore(self) -> list[Cache]:
        """Fresh caches that hold these tokens, one a layer, of the classes that the model makes for one row. Each
        call copies: what is written to one result shows in no other, nor in the store. A paused row that was read to
        where its caches lie is given away, once.

        Raises:
            RuntimeError: after `release`, or for a row that was given away.
        """
        if self._blocks is None:
            raise RuntimeError("the lease was released, or its row given away: look it up again")
        caches = self._codec.assemble(self._blocks, self._state, self.tokens, self._landed)
        if self._landed:
            self.release()
        return caches

    def release(self) -> None:
        """Nothing more will be asked of it. Again does nothing."""
        if self._blocks is not None:
            self._blocks = self._state = None
            self._landed = {}
            self._on_release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Leases:
    """Hands leases out.

    Args:
        codec: knows the model's caches.

    Attributes:
        held: leases that nobody has released yet.
    """

    def __init__(self, codec: Codec):
        self._codec, self.held = codec, 0

    def new(self, blocks: Sequence[Record], state: Record | None, tokens: int, **private: Any) -> Lease:
        """One more; arguments as for `Lease`."""
        self.held += 1
        return Lease(self._codec, blocks, state, tokens, on_release=self._released, **private)

    def _released(self) -> None:
        self.held -= 1
