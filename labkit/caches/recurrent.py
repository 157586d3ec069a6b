"""The states of recurrent layers (conv tails, DeltaNet or SSM states): one fixed size whatever the context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import mlx.core as mx

from labkit.caches import host
from labkit.caches.base import OPERATIONS, Cache, Unsupported
from labkit.caches.by_row import columns_of_tokens, per_row, row_numbers, to_keep
from labkit.caches.host import HostViews, Lent
from labkit.caches.layout import ArraySpec, Layout, dtype_name

_NO_COLUMNS = {"trim", "append"}


class Recurrent(Cache):
    """The states of one row (or of several equally long ones); `cache[i]` reads and writes state i.

    State-compatible with mlx-lm's `ArraysCache`. Nothing can be trimmed: a state has taken its tokens in for good. A
    span is taken back through `checkpoint`, and a part of a span is kept where the layer has recorded its states after
    every token (`record`).

    Attributes:
        lengths: valid tokens still to come in right-padded input, int32 [B], or None.
        left_padding: padding still to come before each row's first token, int32 [B], or None.
    """

    kind = "recurrent"
    supports = OPERATIONS - _NO_COLUMNS - {"extend", "filter", "extract"}
    cache = Lent()
    _host: HostViews | None = None
    _owned = False  # whether nobody else has the states, though the host has not made them

    def __init__(self, size: int = 2, layout: Layout | None = None, *, batch: int = 1):
        self.cache = [None] * size
        self.left_padding: mx.array | None = None
        self.lengths: mx.array | None = None
        self.layout = layout
        self._batch = batch
        self._forget_span()

    def __getitem__(self, index: int) -> mx.array | None:
        return self.cache[index]

    def __setitem__(self, index: int, value: mx.array | None) -> None:
        self._cache[index] = value
        self._forget()
        if self.layout is None and all(state is not None for state in self._cache):
            self.layout = self._layout_now()

    def _layout_now(self) -> Layout:
        specs = (
            ArraySpec(f"state{i}", tuple(s.shape[1:]), dtype_name(s.dtype), per_token=False)
            for i, s in enumerate(self.cache)
        )
        return Layout(self.kind, tuple(specs))

    @property
    def batch_size(self) -> int:
        first = next((state for state in self._cache if state is not None), None)
        return self._batch if first is None else first.shape[0]

    def size(self) -> int:
        return 0

    def empty(self) -> bool:
        return all(state is None for state in self._cache)

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self._cache if state is not None)

    def host_states(self, batch: int) -> HostViews:
        """float32 views of the states, for the host to change; zeros before the first token. They stay the same memory
        from call to call, unless a reader may still hold it.

        Args:
            batch: rows, for a cache that is still empty.
        """
        if self._owned:
            self._host, self._owned = host.views(self._cache), False
        if self._host is None or self._host.lent:
            pairs = [
                host.zeros((batch, *spec.shape)) if state is None else host.copied(state)
                for state, spec in zip(self._cache, self.layout.arrays, strict=True)
            ]
            self.cache = [array for array, _ in pairs]
            self._host = HostViews([view for _, view in pairs])
        return self._host

    def own(self) -> None:
        self._owned = True

    def _forget(self) -> None:
        self._host, self._owned = None, False

    def _lend(self) -> None:
        self._owned = False
        if self._host is not None:
            self._host.lent = 1

    @classmethod
    def bytes_of(cls, layout: Layout, tokens: int, *, chunk: int = 1) -> int:
        return layout.bytes_fixed if tokens else 0

    @property
    def state(self) -> tuple:
        return self.cache, self.left_padding, self.lengths

    @state.setter
    def state(self, value: tuple) -> None:
        states, self.left_padding, self.lengths = value
        self.cache = list(states)
        padding = self.left_padding if self.left_padding is not None else self.lengths
        self._batch = 1 if padding is None else padding.size
        self.layout = self._layout_now() if all(s is not None for s in self.cache) else None
        self._forget_span()

    def copy(self) -> Self:
        twin = super().copy()
        twin._batch = self.batch_size
        return twin

    # -- padding: masked tokens leave every state as it is -----------------------------------------------------------

    def make_mask(self, n: int, **_: Any) -> mx.array | None:
        """bool [B, n], False where the next n tokens are padding; None if none is."""
        columns = mx.arange(n)
        mask = None
        if self.left_padding is not None:
            mask = columns >= self.left_padding[:, None]
        if self.lengths is not None:
            valid = columns < self.lengths[:, None]
            mask = valid if mask is None else mask & valid
        return mask

    def prepare(self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None) -> None:
        if left_padding is not None:
            if not self.empty():
                raise ValueError("left padding belongs before the first token of a batch")
            padding = per_row(left_padding, self.batch_size)
            self.left_padding = mx.array(padding, dtype=mx.int32) if any(padding) else None
        if lengths is not None and (right_padding is None or any(per_row(right_padding, self.batch_size))):
            self.lengths = mx.array(per_row(lengths, self.batch_size), dtype=mx.int32)

    def finalize(self) -> None:
        self.lengths = self.left_padding = None

    def advance(self, n: int) -> None:
        if self._mark is not None:
            tokens = [n] * self.batch_size if self.lengths is None else self.lengths.tolist()
            self._advanced.append((n, [min(n, max(0, count)) for count in tokens]))
        if self.lengths is not None:
            self.lengths = self.lengths - n
        if self.left_padding is not None:
            self.left_padding = self.left_padding - n

    # -- a span that may be taken back -------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        self._forget_span()
        self._mark = list(self.cache)

    def _forget_span(self) -> None:
        self._mark = None
        self._advanced: list[tuple[int, list[int]]] = []  # columns of each forward, and tokens among them by row
        self._recorded: dict[int, list[mx.array]] = {}

    @property
    def recording(self) -> bool:
        """Whether a checkpoint is open: a layer that can should `record` its states after every token."""
        return self._mark is not None

    def record(self, index: int, states: mx.array) -> None:
        """The layer's state `index` after each column of this forward, [B, L, ...], so that `commit` may choose."""
        if self._mark is not None:
            self._recorded.setdefault(index, []).append(states)

    def check_commit(self, accepted: Any) -> None:
        super().check_commit(accepted)
        self._last_columns(to_keep(accepted, self.batch_size))

    def commit(self, accepted: Any) -> None:
        self.check_commit(accepted)
        last, before = self._last_columns(to_keep(accepted, self.batch_size)), self._mark
        if last is not None:
            self.cache = [self._after(i, state, last) if any(last) else state for i, state in enumerate(before)]
        self._forget_span()

    def _last_columns(self, kept: Sequence[int]) -> list[int] | None:
        """For each row how many of the span's columns lead to its last kept token, 0 for none; None if all stay.

        Raises:
            Unsupported: a part of a span of which the layer has not recorded every state.
        """
        if not any(kept):
            return [0] * len(kept)
        if not self._advanced:
            if any(now is not then for now, then in zip(self._cache, self._mark, strict=True)):
                raise Unsupported(self.kind, f"keep {kept} tokens", "its layer does not say how many have passed")
            return None
        tokens = columns_of_tokens(self._advanced)
        if all(n >= len(row) for n, row in zip(kept, tokens, strict=True)):
            return None
        columns = sum(columns for columns, _ in self._advanced)
        if any(self._recorded_columns(index) != columns for index in range(len(self._cache))):
            raise Unsupported(
                self.kind,
                f"keep {kept} of {columns} tokens",
                "its layer recorded no states between: roll back and run the kept tokens again",
            )
        kept = [min(n, len(row)) for n, row in zip(kept, tokens, strict=True)]
        return [row[n - 1] + 1 if n else 0 for n, row in zip(kept, tokens, strict=True)]

    def _recorded_columns(self, index: int) -> int:
        return sum(states.shape[1] for states in self._recorded.get(index, []))

    def _after(self, index: int, before: mx.array | None, last: Sequence[int]) -> mx.array:
        """State `index` after the first last[b] columns of the span in row b."""
        after = self._recorded[index]
        if before is None:
            before = mx.zeros_like(after[0][:, 0])
        every = mx.concatenate([before[:, None], *after], axis=1)
        return every[mx.arange(every.shape[0]), mx.array(last)]

    # -- rows --------------------------------------------------------------------------------------------------------

    @classmethod
    def merge(cls, caches: Sequence[Recurrent]) -> BatchedRecurrent:
        return BatchedRecurrent.from_rows(caches)

    def _pack(self) -> tuple[dict, dict]:
        arrays = {f"state{i}": mx.contiguous(s) for i, s in enumerate(self.cache) if s is not None}
        for name in ("left_padding", "lengths"):
            if getattr(self, name) is not None:
                arrays[name] = getattr(self, name)
        return arrays, {"size": len(self.cache), "batch": self.batch_size}

    def _unpack(self, arrays: dict, scalars: dict) -> None:
        self.cache = [arrays.get(f"state{i}") for i in range(scalars["size"])]
        self.left_padding, self.lengths = arrays.get("left_padding"), arrays.get("lengths")
        self._batch = scalars["batch"]
        self._forget_span()


class BatchedRecurrent(Recurrent):
    """Recurrent states of several rows, some of them fresh: a fresh row's state is zero, never a neighbour's."""

    batched = True
    supports = OPERATIONS - _NO_COLUMNS

    def filter(self, rows: Any) -> None:
        self._no_open_span("filter")
        rows = row_numbers(rows, self.batch_size)
        self._batch = rows.size
        self.cache = [None if state is None else state[rows] for state in self.cache]
        self.left_padding = None if self.left_padding is None else self.left_padding[rows]
        self.lengths = None if self.lengths is None else self.lengths[rows]

    def extend(self, other: Cache) -> None:
        self._no_open_span("extend")
        self._append([other])

    def _append(self, others: Sequence[Cache]) -> None:
        """Append their rows, all at once: one by one, each would copy all that came before it."""
        caches = [self, *others]
        batches = [cache.batch_size for cache in caches]

        def joined(parts: Sequence[mx.array | None]) -> mx.array | None:
            like = next((part for part in parts if part is not None), None)
            if like is None or len(parts) == 1:
                return like
            zeros = [mx.zeros((n, *like.shape[1:]), like.dtype) for n in batches]
            return mx.concatenate([zero if part is None else part for part, zero in zip(parts, zeros, strict=True)])

        self.cache = [joined(states) for states in zip(*(cache.cache for cache in caches), strict=True)]
        self.left_padding = joined([cache.left_padding for cache in caches])
        self.lengths = joined([cache.lengths for cache in caches])
        self.layout = next((cache.layout for cache in caches if cache.layout), None)
        self._batch = sum(batches)

    def extract(self, row: int) -> Recurrent:
        single = Recurrent(len(self.cache), self.layout)
        single.cache = [None if state is None else state[row_numbers([row], self.batch_size)] for state in self.cache]
        return single

    @classmethod
    def from_rows(cls, caches: Sequence[Recurrent]) -> BatchedRecurrent:
        """The rows of serial caches, as copies."""
        result = cls(len(caches[0].cache), caches[0].layout, batch=caches[0].batch_size)
        result.cache = list(caches[0].cache)
        result._append(caches[1:])
        return result
