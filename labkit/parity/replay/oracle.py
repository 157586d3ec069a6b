"""mlx-lm's model and mlx-lm's caches, moved through an engine's log."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import mlx.core as mx

from labkit.engine import StepRecord

UNDEFINED = {
    "empty rows merged": "merging recurrent caches before any token sets a left padding of zeros, which nothing else "
    "does: labkit leaves it unset, and both mask the same columns. Compared as equal.",
    "empty rows filtered": "BatchKVCache([3, 0]).filter([0]) before the first token makes the column index negative, "
    "and the next mask empty: labkit keeps the padding that was declared. A log filters rows after their first token.",
    "one token at the end of padded input, on a ring": "BatchRotatingKVCache raises 'finalize() should be called': "
    "labkit writes it as a block. A log pads only forwards of several columns.",
    "a block on a ring that has turned": "the mask of BatchRotatingKVCache takes the write column for the number of "
    "columns, and hides a short row's oldest token: labkit counts the columns. Logs write turned rings token by token.",
    "an empty recurrent row extracted": "ArraysCache.extract raises: labkit gives empty caches. A log extracts rows "
    "after their first token.",
    "padding shared on a ring": "BatchRotatingKVCache.filter keeps it, where BatchKVCache drops it: labkit does "
    "the same as each. Compared.",
    "free room": "how far buffers are allocated ahead of what is in use may differ. Not compared.",
}
"""Where mlx-lm 0.32 is undefined, inconsistent or wrong, and what labkit does instead."""

Ids = tuple[str, ...]


class Oracle:
    """Follows a log record by record.

    Args:
        module: mlx-lm's model.
        grid: tokens of a chunk, for states that came from a store: they are computed anew.
        prompts: request id -> its prompt, for the same.
    """

    def __init__(self, module: Any, *, grid: int = 2048, prompts: dict[str, tuple[int, ...]] | None = None):
        self._module, self._grid, self._prompts = module, grid, prompts or {}
        self.caches: dict[Ids, list[Any]] = {}

    def step(self, record: StepRecord) -> tuple[mx.array | None, list[Any]]:
        """Do what a record says.

        Returns:
            logits [B, V] of a decode step, None of a prefill; the caches.
        """
        for operation, *about in record.operations:
            self._operations[operation](self, *about)
        if record.shape == (0, 0):
            return None, []
        caches = self.caches[record.rows]
        padding = [record.shape[1] - length for length in record.lengths]
        tokens = mx.array([[*row, *[0] * pad] for row, pad in zip(record.inputs, padding, strict=True)])
        if any(padding):
            for cache in caches:
                cache.prepare(lengths=list(record.lengths), right_padding=padding)
        logits = self._module(tokens, cache=caches)
        if any(padding):
            for cache in caches:
                cache.finalize()
        # Nobody reads a prompt's logits: left lazy, the head is never computed for it.
        logits = logits[:, -1, :] if record.kind == "decode" else None
        mx.eval(logits, [cache.state for cache in caches])
        return logits, caches

    # -- what is done to caches ------------------------------------------------------------------------------------

    def _new(self, id: str) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        self.caches[id,] = make_prompt_cache(self._module)

    def _restore(self, id: str, tokens: int) -> None:
        self._new(id)
        for start in range(0, tokens, self._grid):
            end = min(start + self._grid, tokens)  # blocks of a live neighbour end off the grid
            self._module(mx.array([self._prompts[id][start:end]]), cache=self.caches[id,])

    def _copy(self, id: str, other: str) -> None:
        ids, row = next((ids, ids.index(other)) for ids in self.caches if other in ids)
        source = self.caches[ids]
        self.caches[id,] = deepcopy(source) if len(ids) == 1 else [cache.extract(row) for cache in source]

    def _merge(self, ids: Ids) -> None:
        layers = zip(*(self.caches.pop((id,)) for id in ids), strict=True)
        self.caches[tuple(ids)] = [type(layer[0]).merge(list(layer)) for layer in layers]

    def _extend(self, ids: Ids, more: Ids) -> None:
        if self._serial(more):
            self._merge(more)
        caches, others = self.caches.pop(tuple(ids)), self.caches.pop(tuple(more))
        for cache, other in zip(caches, others, strict=True):
            cache.extend(other)
        self.caches[(*ids, *more)] = caches

    def _serial(self, ids: Ids) -> bool:
        """Whether a row has caches of the serial classes: one that a cancel left alone in a batch does not."""
        from mlx_lm.models.cache import make_prompt_cache

        serial = list(map(type, make_prompt_cache(self._module)))
        return len(ids) == 1 and list(map(type, self.caches[tuple(ids)])) == serial

    def _filter(self, ids: Ids, kept: Ids) -> None:
        caches = self.caches.pop(tuple(ids))
        if not kept:
            return
        rows = [ids.index(id) for id in kept]
        for cache in caches:
            cache.filter(rows)
        self.caches[tuple(kept)] = caches

    def _extract(self, ids: Ids, id: str) -> None:
        caches = [cache.extract(ids.index(id)) for cache in self.caches[tuple(ids)]]
        self.caches[id,] = caches

    def _park(self, id: str) -> None:
        self.caches.pop((id,), None)

    def _stay(self, id: str) -> None:
        """A row that is paused stands alone already, and goes on from the same caches."""

    _operations: dict[str, Callable[..., None]] = {  # noqa: RUF012
        "new": _new,
        "restore": _restore,
        "copy": _copy,
        "merge": _merge,
        "extend": _extend,
        "filter": _filter,
        "extract": _extract,
        "park": _park,
        "pause": _stay,
        "resume": _stay,
    }
