"""The cache contract (the second of the five), with both of its faces.

Towards mlx-lm a cache is what its modules expect: `update_and_fetch`, `make_mask`, `offset`, `state`, `lengths` and
so on: any mlx-lm model runs on these caches, and their state moves to mlx-lm's own classes and back. Towards labkit's
kernels it is `append` and `attend` over buffers of fixed capacity. Around both stand the operations that an engine
needs: rows that merge, extend, filter and extract; a span of tokens that is committed or rolled back; snapshots.

A kind that cannot do one of `OPERATIONS` leaves it out of `supports` and raises `Unsupported` when it is asked anyway;
`lacking` tells a model at load time what its caches cannot do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any, ClassVar, Self

import mlx.core as mx

from labkit.caches import snapshots
from labkit.caches.layout import Layout

OPERATIONS = frozenset(
    {
        "trim",  # drop the newest tokens for good
        "merge",  # serial rows -> one batched cache
        "extend",  # append rows to a batched cache
        "filter",  # keep some rows of a batched cache
        "extract",  # one row of a batched cache -> a serial cache of its own
        "prepare",  # padded input, by rows
        "commit",  # keep any number of the tokens since a checkpoint
        "rollback",  # return to a checkpoint
        "snapshot",  # to bytes and back
        "append",  # the face towards kernels
        "bytes_for",  # the size for a number of tokens, before they are there
    }
)


class Unsupported(NotImplementedError):
    """A cache kind was asked for an operation that it cannot do."""

    def __init__(self, kind: str, operation: str, reason: str):
        super().__init__(f"a {kind} cache cannot {operation}: {reason}")
        self.kind, self.operation, self.reason = kind, operation, reason


class Cache(ABC):
    """What one layer remembers of the tokens so far, for one row (serial) or for several (batched).

    Attributes:
        kind: "contiguous", "rotating", "recurrent", ...; serial and batched classes of a kind share it.
        batched: whether the class holds any number of rows with padding of their own. A serial class holds rows that
            are all equally long (almost always one row).
        supports: the operations of `OPERATIONS` that this class can do.
        layout: shapes and dtypes of the arrays; None until the first update of a cache that was made without one.
    """

    kind: ClassVar[str]
    batched: ClassVar[bool] = False
    supports: ClassVar[frozenset[str]] = OPERATIONS
    layout: Layout | None = None
    _mark: Any = None

    # -- towards mlx-lm ----------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def state(self) -> Any:
        """Arrays and scalars in mlx-lm's order: what `mx.eval` must evaluate, and what moves to mlx-lm's own class."""

    @state.setter
    @abstractmethod
    def state(self, value: Any) -> None: ...

    @property
    def meta_state(self) -> dict[str, Any]:
        """The scalars of `state` by name, as they are stored beside a snapshot's arrays."""
        return self._pack()[1]

    @classmethod
    def from_state(cls, state: Any) -> Self:
        """A cache with this `state`, which may come from mlx-lm's class of the same kind."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the buffers as allocated, free room included."""

    @abstractmethod
    def empty(self) -> bool:
        """Whether nothing was ever written."""

    @abstractmethod
    def size(self) -> int:
        """Columns that attention can see: tokens, and padding where rows differ; 0 for a kind without columns."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Rows."""

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        """The mask for the next N tokens, to be asked for before they are written."""
        raise Unsupported(self.kind, "make a mask", "it holds no columns")

    def is_trimmable(self) -> bool:
        """Whether `trim` would work now."""
        return False

    def trim(self, n: int) -> int:
        """Forget the newest `n` tokens of every row; returns how many were there to forget."""
        if n == 0:
            return 0
        raise Unsupported(self.kind, "trim", "what it has taken in cannot be taken out")

    def prepare(self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None) -> None:
        """Say how the tokens to come are padded. Left padding: only before the first token. Right padding: `lengths`
        valid tokens in each row of the input to come, then `right_padding` others, until `finalize`."""
        raise Unsupported(self.kind, "take padded input", "it is serial")

    def finalize(self) -> None:  # noqa: B027
        """End of right-padded input: the padding is moved out of the way of what comes next."""

    def advance(self, n: int) -> None:  # noqa: B027
        """`n` tokens passed through the layer (recurrent kinds count with it)."""

    # -- rows --------------------------------------------------------------------------------------------------------

    @classmethod
    def merge(cls, caches: Sequence[Self]) -> Cache:
        """One batched cache with the rows of `caches`, in order, as copies."""
        raise Unsupported(cls.kind, "merge", "there is no batched form of it")

    def extend(self, other: Cache) -> None:
        """Append the rows of `other`, a cache of the same kind, serial or batched. Older rows stay as they are."""
        raise Unsupported(self.kind, "extend", "only a batched cache grows rows")

    def filter(self, rows: Any) -> None:
        """Keep these rows, in this order."""
        raise Unsupported(self.kind, "filter", "only a batched cache loses rows")

    def extract(self, row: int) -> Cache:
        """A serial cache with this row alone: a real copy, which keeps no other row's memory alive."""
        raise Unsupported(self.kind, "extract", "only a batched cache has several rows")

    def copy(self) -> Self:
        """A second cache with the same content: what is written to one never shows in the other."""
        # Handles of their own: an assignment to a slice changes the array behind the handle it is made through.
        twin = type(self).from_state(_own_handles(self.state))
        twin.layout = self.layout
        return twin

    # -- a span that may be taken back -------------------------------------------------------------------------------

    @abstractmethod
    def checkpoint(self) -> None:
        """Mark this point: `commit` keeps a part of what is written after it."""

    @abstractmethod
    def commit(self, accepted: Any) -> None:
        """Keep the first `accepted` tokens after the checkpoint (an int, or one by row; all that there are if more) and
        forget the checkpoint. Right-padded input counts with its valid tokens, once it is finalized. All layers of a
        model together: `labkit.caches.commit`.

        Raises:
            ValueError: without a checkpoint, or a negative number.
            Unsupported: tokens of which this layer cannot keep a part.
        """

    def check_commit(self, accepted: Any) -> None:
        """Raise what `commit(accepted)` would, and change nothing."""
        from labkit.caches.by_row import to_keep

        if self._mark is None:
            raise ValueError("commit without a checkpoint")
        to_keep(accepted, self.batch_size)

    def rollback(self) -> None:
        """Return to the checkpoint."""
        self.commit([0] * self.batch_size)

    def _no_open_span(self, operation: str) -> None:
        """Raises ValueError between `checkpoint` and `commit`, for what would leave the mark behind."""
        if self._mark is not None:
            raise ValueError(f"a {self.kind} cache cannot {operation} after a checkpoint: commit or roll back first")

    # -- towards labkit's kernels ------------------------------------------------------------------------------------

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Write keys and values [B, H, L, D] into the buffers, which keep their shape while there is room."""
        raise Unsupported(self.kind, "append keys and values", "it holds a state")

    def attend(self, queries: mx.array, *, scale: float) -> mx.array:
        """Attention of queries [B, Hq, L, D], the L newest tokens, over the whole buffers -> [B, Hq, L, Dv]."""
        raise Unsupported(self.kind, "attend", "it holds a state")

    def release(self) -> None:  # noqa: B027
        """Give back what is held of a shared pool: the cache is empty afterwards. Nothing to do for other kinds."""

    # -- bytes -------------------------------------------------------------------------------------------------------

    @classmethod
    def bytes_of(cls, layout: Layout, tokens: int, *, chunk: int = 1) -> int:
        """Bytes that one row of `tokens` tokens takes, written at most `chunk` at a time. Monotone in both."""
        raise Unsupported(cls.kind, "say its size in advance", "it does not know its arrays")

    def bytes_for(self, tokens: int, *, chunk: int = 1) -> int:
        """`bytes_of` for this cache's own layout, all rows together.

        Raises:
            ValueError: if no token has passed yet and the cache was made without a layout.
        """
        if self.layout is None:
            raise ValueError(
                f"this {self.kind} cache has seen no token: give it a layout, or ask after the first update"
            )
        return self.batch_size * type(self).bytes_of(self.layout, tokens, chunk=chunk)

    @abstractmethod
    def _pack(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        """Arrays (valid part only) and JSON scalars that make a snapshot."""

    @abstractmethod
    def _unpack(self, arrays: dict[str, mx.array], scalars: dict[str, Any]) -> None: ...

    def dump(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        """Arrays and JSON scalars, from which `fill` makes a cache that goes on with the same bits."""
        return self._pack()

    def fill(self, arrays: dict[str, mx.array], scalars: dict[str, Any]) -> None:
        """Hold what `dump` gave, in place of whatever is here."""
        self._unpack(arrays, scalars)

    def columns(self, start: int, end: int) -> dict[str, mx.array]:
        """The arrays of the tokens start to end, of a kind whose layout is `by_token`."""
        return {name: array[..., start:end, :] for name, array in self._pack()[0].items()}

    def room_for(self, tokens: int) -> int:
        """How many columns `fill_columns` is best given for `tokens` tokens: more where the kind goes on in them."""
        return tokens

    def fill_columns(self, arrays: dict[str, mx.array], tokens: int) -> None:
        """Hold the first `tokens` tokens, whose `columns` these are; up to `room_for` of them may be room."""
        self._unpack(arrays, {"offset": tokens})

    def own(self) -> None:  # noqa: B027
        """Be told that nobody else has these arrays: the host may go on in them where it computes."""

    def snapshot(self) -> bytes:
        """This cache as bytes: safetensors, class and layout fingerprint in the header. What is valid, no slack."""
        arrays, scalars = self._pack()
        return snapshots.to_bytes(type(self).__name__, self.layout, arrays, scalars)

    @classmethod
    def restore(cls, data: bytes, layout: Layout | None = None) -> Self:
        """The cache that `snapshot` wrote.

        The bytes carry no checksum of the arrays: a store on disk (the prefix store) adds its own.

        Raises:
            ValueError: bytes whose header is damaged, of another class, or (with `layout`) of another layout.
        """
        arrays, scalars, stored = snapshots.from_bytes(cls.__name__, layout, data)
        cache = cls.__new__(cls)
        cache.layout = stored or layout
        try:
            cache._unpack(arrays, scalars)
        except KeyError as error:
            raise ValueError(f"these {len(data)} bytes are no snapshot of a {cls.__name__}: no {error}") from error
        return cache


def _own_handles(state: Any) -> Any:
    """Arrays of a `state` by handles of their own; the bytes are shared until one of them is written."""
    if isinstance(state, (tuple, list)):
        return type(state)(_own_handles(item) for item in state)
    return copy(state) if isinstance(state, mx.array) else state


def lacking(serial: Iterable[Cache], batched: Iterable[Cache]) -> dict[str, tuple[str, ...]]:
    """Operation -> kinds that can do it in neither of their classes; an operation that all can do is absent."""
    result: dict[str, set[str]] = {}
    for cache, several in zip(serial, batched, strict=True):
        for operation in OPERATIONS - cache.supports - several.supports:
            result.setdefault(operation, set()).add(cache.kind)
    return {operation: tuple(sorted(kinds)) for operation, kinds in sorted(result.items())}
