"""Keeps what an engine's model computed at every forward: logits and the state of every cache."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from labkit.caches import Cache
from labkit.caches.paged_cache import PagedCache
from labkit.engine import Engine
from labkit.engine.prefill import masks_padding
from labkit.models import LoadedModel, Output, Rows


@dataclass(frozen=True)
class Recording:
    """One forward.

    Attributes:
        logits: [B, V] of a decode step, None of a prefill.
        kinds: the kind of each cache.
        states: the state of each cache after the forward, in mlx-lm's order.
    """

    logits: mx.array | None
    kinds: tuple[str, ...]
    states: tuple[Any, ...]


class Recorder:
    """A `Model` that passes everything on and remembers it."""

    def __init__(self, model: Any):
        self._model = model
        self.forwards: list[Recording] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    # What is known of the model by trying, once a model, is known of it recorded.
    def __eq__(self, other: object) -> bool:
        return self._model is (other._model if isinstance(other, Recorder) else other)

    def __hash__(self) -> int:
        return hash(self._model)

    def __call__(self, tokens: mx.array, caches: list[Cache], rows: Rows, **options: Any) -> Output:
        output = self._model(tokens, caches, rows, **options)
        # Of a cache in pages, what it would hold in a rectangle.
        plain = [cache.plain_cache() if isinstance(cache, PagedCache) else cache for cache in caches]
        states = tuple(handles(cache.state) for cache in plain)
        logits = None if output.logits is None else output.logits[:, -1, :]
        self.forwards.append(Recording(logits, tuple(cache.kind for cache in caches), states))
        return output

    @classmethod
    def engine(cls, loaded: LoadedModel, **options: Any) -> tuple[Engine, Recorder]:
        """An engine whose model is recorded."""
        recorder = cls(loaded.model)
        engine = Engine(replace(loaded, model=recorder), **options)
        masks_padding(loaded.model)  # found by forwards that no log tells of
        return engine, recorder


def handles(state: Any) -> Any:
    """A state that stays as it is: assigning to a slice changes the array of the handle that is used."""
    if isinstance(state, (tuple, list)):
        return type(state)(handles(item) for item in state)
    return copy(state) if isinstance(state, mx.array) else state
