"""Requests over paged caches (`labkit.caches.PagedKV`): what a row begins with, and who may start, in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.caches import Cache, PagedKV
from labkit.caches.extra_keys import ExtraKeys
from labkit.caches.paged_cache import PagedCache
from labkit.caches.pages import DEFAULT_BLOCK
from labkit.caches.recurrent_slots import SlottedRecurrent
from labkit.engine.admission import Admission
from labkit.engine.capacity import Budget, CapacityError
from labkit.engine.hooks import PrefixStore
from labkit.engine.request import Request
from labkit.engine.session import Session
from labkit.kernels.targets import device_target
from labkit.models import LoadedModel


class Paging:
    """Caches for requests, from the pools of one model.

    A prompt that begins like that of a live request begins with its blocks, and computes the rest. On a GPU only whole
    cells of the prefill grid are shared: other widths round differently, and neighbours must not show in an answer.
    Models with recurrent layers compute every prompt, since nobody keeps their states at the ends of blocks, and share
    the memory of equal blocks all the same.

    Args:
        loaded: the model.
        budget: what there is.
        block_tokens, pool_bytes: as for `PagedKV`; the pools may take what the weights and the rows' own bytes leave,
            by default.
        max_rows, grid: rows at a time, and tokens of a chunk.

    Attributes:
        kv: the pools.

    Raises:
        ValueError: a model whose graph reads plain caches only, or a pool without room.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        budget: Budget,
        *,
        block_tokens: int | None = None,
        pool_bytes: int | None = None,
        max_rows: int,
        grid: int,
    ):
        model = loaded.model
        if not getattr(model, "takes_pages", False):
            raise ValueError(
                f"{type(model).__name__}, the graph of {loaded.name}, reads plain caches only: load the model with "
                'graph="adapter", or leave kv="contiguous"'
            )
        options = {"block_tokens": block_tokens or DEFAULT_BLOCK, "max_rows": max_rows, "chunk": grid}
        if pool_bytes is None:
            probe = PagedKV(model.make_caches(), model.layouts, pool_bytes=1 << 50, **options)
            left = budget.capacity.capacity_bytes - loaded.weights_bytes - max_rows * probe.row_bytes
            pool_bytes = max(left, probe.block_bytes)
        self.kv = PagedKV(model.make_caches(), model.layouts, pool_bytes=pool_bytes, **options)
        self._align = grid if device_target() else 1

    def begin(self, session: Session) -> tuple[list[Cache], int]:
        """Caches of a request, and how many tokens of its prompt they hold already."""
        prompt = session.known[: session.to_prefill + 1]
        return self.kv.make_caches(prompt, session.total, align=self._align, extra=session.request.extra)

    def take(self, session: Session, caches: Sequence[Cache]) -> list[Cache]:
        """Plain caches that were stored, or a copy of another row's -> this row's."""
        return self.kv.adopt(caches, session.known, session.total, session.request.extra)


class PlainStates:
    """A store of prefixes for an engine with pages: what it is offered are the plain classes' states, so that stored
    bytes do not depend on how an engine keeps its caches."""

    def __init__(self, store: PrefixStore):
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def commit(self, tokens: Sequence[int], caches: Sequence[Cache], **options: Any) -> Any:
        """As the store's."""
        return self._store.commit(tokens, _plain(caches), **options)

    def save_private(self, id: str, tokens: Sequence[int], caches: Sequence[Cache], **options: Any) -> Any:
        """As the store's."""
        return self._store.save_private(id, tokens, _plain(caches), **options)


def _plain(caches: Sequence[Cache]) -> list[Cache]:
    return [cache.plain_cache() if isinstance(cache, (PagedCache, SlottedRecurrent)) else cache for cache in caches]


class PagedAdmission(Admission):
    """Admits in blocks: a request starts when all blocks that it may come to need can be promised to it.

    Args:
        paging: the pools.
        budget, chunk, max_rows: as for `Admission`.
    """

    def __init__(self, paging: Paging, budget: Budget, *, chunk: int, max_rows: int):
        super().__init__(budget, chunk=chunk, max_rows=max_rows, rectangle=False)
        self._kv = paging.kv

    def check(self, request: Request) -> None:
        total = len(request.tokens) + request.params.max_tokens
        needed = self._kv.blocks_needed(total)
        if needed <= self._kv.blocks and len(request.tokens) <= self.capacity.max_context_tokens:
            return
        kv, capacity = self._kv, self.capacity
        record: dict[str, Any] = {
            "code": "context_exceeds_capacity",
            "retryable": False,
            "prompt_tokens": len(request.tokens),
            "max_tokens": request.params.max_tokens,
            "required_bytes": needed * kv.block_bytes,
            "capacity_bytes": kv.blocks * kv.block_bytes,
            "weights_bytes": capacity.weights_bytes,
            "kv_bytes_per_token": capacity.kv_bytes_per_token,
            "max_context_tokens": min(capacity.max_context_tokens, (kv.blocks + 1) * kv.block_tokens - 1),
            "needed_blocks": needed,
            "capacity_blocks": kv.blocks,
            "block_tokens": kv.block_tokens,
        }
        raise CapacityError(
            f"{len(request.tokens)} prompt tokens and {request.params.max_tokens} more need {needed} blocks of "
            f"{kv.block_tokens} tokens, and the pool has {kv.blocks}: lower max_tokens, shorten the prompt, or give "
            "more pool_bytes",
            record,
        )

    def projected(self, totals: Sequence[int]) -> int:
        return sum(self._bytes(total) for total in totals)

    def _bytes(self, tokens: int) -> int:
        return self._kv.blocks_needed(tokens) * self._kv.block_bytes + self._kv.row_bytes

    def idle_bytes(self) -> int:
        return self._kv.snapshot()["idle"]

    def promises(self, total: int, tokens: Sequence[int], extra: ExtraKeys = ()) -> bool:
        return self._kv.fits(total, tokens, extra)

    def fits_now(self, total: int, live: Sequence[int], tokens: Sequence[int] = (), extra: ExtraKeys = ()) -> bool:
        """Whether a request of `total` tokens may start: prompts that begin like a live one's need fewer blocks."""
        return len(live) < self.max_rows and self._kv.fits(total, tokens, extra)
