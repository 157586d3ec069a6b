"""Any mlx-lm model behind the forward contract: its graph as it is, labkit's caches, only the asked-for logits.

Most mlx-lm models are a trunk that ends at hidden states, and a head around it (sometimes scaled or capped). The
adapter lets the trunk hand over only the positions asked for, so that the model's own head code runs on them alone: it
need not know that code. What the caches look like is found by one forward that is built and never evaluated.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from labkit.caches import Cache, Contiguous, Foreign, Recurrent, Rotating, Unsupported, lacking
from labkit.models.contract import LayerKind, LogitsFor, Output, select_columns
from labkit.models.placement import check_rows, place, prepare
from labkit.models.rows import Rows

_INNER = ("language_model", "model", "backbone", "transformer")
_KINDS: dict[str, LayerKind] = {
    "contiguous": "full_attention",
    "rotating": "sliding_attention",
    "recurrent": "linear_attention",
}


class Adapter:
    """`module`, any mlx-lm model, as a `labkit.models.Model`.

    Attributes:
        takes_pages: its caches may lie in the blocks of a shared pool (`labkit.caches.PagedKV`).
    """

    takes_pages = True

    def __init__(self, module: nn.Module, config: dict[str, Any]):
        self.module, self.config = module, config
        self.accepts_embeddings = "input_embeddings" in inspect.signature(type(module).__call__).parameters
        self._blueprint = [_describe(cache) for cache in _mlx_caches(module)]
        self.num_layers = len(getattr(module, "layers", self._blueprint))
        self.dtype = activation_dtype(parameter for _, parameter in tree_flatten(module.parameters()))
        self._trunk = _innermost(module)
        if self._trunk is not None:
            _install_tap(self._trunk)
        self._probe()
        self.batches = self._probe_batch()
        self.limits = self._limits()

    # -- caches --------------------------------------------------------------------------------------------------------

    def make_caches(self, batch: int = 1) -> list[Cache]:
        """Empty caches: serial classes for one row, batched classes for more.

        Raises:
            Unsupported: several rows of a kind, or of an architecture, that cannot be batched.
        """
        if batch > 1 and not self.batches:
            raise Unsupported(type(self.module).__module__, "run rows of several lengths", "see Adapter.limits")
        rows = [[make(layout) for make, layout in zip(self._makers, self.layouts, strict=True)] for _ in range(batch)]
        if batch == 1:
            return rows[0]
        return [type(layer[0]).merge(layer) for layer in zip(*rows, strict=True)]

    def _limits(self) -> dict[str, tuple[str, ...]]:
        """Operation -> kinds of cache in this model that cannot do it, in neither their serial nor batched class."""
        serial = self.make_caches()
        limits = lacking(serial, self.make_caches(2) if self.batches else serial)
        return limits if self.batches else limits | {"batch": (type(self.module).__module__,)}

    def _probe(self) -> None:
        """Learn shapes from a forward that is never evaluated; kinds that the module does not fill stay mlx-lm's."""
        self._makers = [maker for maker, _ in self._blueprint]
        self.layouts = [None] * len(self._makers)
        tokens = mx.zeros((1, 2), mx.int32)
        try:
            caches = self.make_caches()
            logits, hidden = self._run(tokens, caches, "last", None, None)
        except (ValueError, IndexError, TypeError, AttributeError):
            # A head that needs every position, or another shape from its trunk.
            logits, hidden = None, None
        self.splits_head = hidden is not None and logits.shape[1] == 1
        if not self.splits_head:
            self._trunk = None
            caches = self.make_caches()
            logits, _ = self._run(tokens, caches, "last", None, None)
        self.vocab_size = logits.shape[-1]
        self.layouts = [cache.layout for cache in caches]
        for index, cache in enumerate(caches):
            if cache.empty() and not isinstance(cache, Foreign):
                self._makers[index] = self._blueprint[index][1]
        self.layer_kinds = [_KINDS.get(cache.kind, "other") for cache in self.make_caches()]

    def _probe_batch(self) -> bool:
        """Whether the module takes rows with padding of their own. Some apply the mask [B, 1, L, T] to scores with an
        axis more, where it fits by accident if B equals the number of heads: 11 rows equal no such number."""
        rows = 11
        self.batches = True
        try:
            caches = self.make_caches(rows)
            prepare(caches, Rows.batch([0] * rows, lengths=[1] * rows), 2)
            scores, _ = self._run(mx.zeros((rows, 2), mx.int32), caches, "last", None, None)
        except (ValueError, TypeError, IndexError, NotImplementedError):
            return False
        return scores.shape[0] == rows

    # -- forward -------------------------------------------------------------------------------------------------------

    def __call__(
        self,
        tokens: mx.array,
        caches: list[Cache],
        rows: Rows,
        *,
        logits: LogitsFor = "last",
        hidden: bool = False,
        embeddings: mx.array | None = None,
    ) -> Output:
        """See `labkit.models.contract.Model`. Rows with adapters, block tables or media positions are refused."""
        self._check(tokens, caches, rows, embeddings)
        if hidden and not self.splits_head:
            raise ValueError(f"{type(self.module).__name__} does not show the hidden states that enter its head")
        length = tokens.shape[1]
        place(caches, rows)
        padded = prepare(caches, rows, length)
        scores, states = self._run(tokens, caches, logits, rows.lengths, embeddings)
        if padded:
            for cache in caches:
                cache.finalize()
        return Output(None if logits is None else scores, states if hidden else None)

    def _run(
        self,
        tokens: mx.array,
        caches: list[Cache],
        logits: LogitsFor,
        lengths: mx.array | None,
        embeddings: mx.array | None,
    ) -> tuple[mx.array, mx.array | None]:
        seen: list[mx.array] = []

        def tap(states: Any) -> Any:
            if seen or not isinstance(states, mx.array) or states.ndim != 3:
                return states
            seen.append(states)
            return select_columns(states, logits, lengths)

        given = [cache.inner if isinstance(cache, Foreign) else cache for cache in caches]
        extra = {} if embeddings is None else {"input_embeddings": embeddings}
        if self._trunk is None:
            return select_columns(self.module(tokens, cache=given, **extra), logits, lengths), None
        _taps.tap = tap
        try:
            scores = self.module(tokens, cache=given, **extra)
        finally:
            _taps.tap = None
        if not seen:
            return select_columns(scores, logits, lengths), None
        return scores, seen[0]

    def _check(self, tokens: mx.array, caches: list[Cache], rows: Rows, embeddings: mx.array | None) -> None:
        check_rows(tokens, rows)
        if len(caches) != len(self._makers):
            raise ValueError(f"{len(caches)} caches for a model that keeps {len(self._makers)}")
        if embeddings is not None and not self.accepts_embeddings:
            raise ValueError(f"{type(self.module).__name__} does not take embeddings in place of tokens")


def _mlx_caches(module: nn.Module) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(module)


def _describe(cache: Any) -> tuple[Any, Any]:
    """mlx-lm's cache -> (how to make labkit's cache for it, how to make a wrapped one of mlx-lm's own class)."""
    import copy

    from mlx_lm.models import cache as mlx_cache

    def foreign(_: Any, fresh: Any = cache) -> Foreign:
        return Foreign(copy.deepcopy(fresh))

    if type(cache) is mlx_cache.KVCache:
        return (lambda layout: Contiguous(layout)), foreign
    if type(cache) is mlx_cache.RotatingKVCache:
        size, keep = cache.max_size, cache.keep
        return (lambda layout: Rotating(size, keep, layout)), foreign
    if type(cache) is mlx_cache.ArraysCache:
        count = len(cache.cache)
        return (lambda layout: Recurrent(count, layout)), foreign
    return foreign, foreign


def _innermost(module: nn.Module) -> nn.Module | None:
    """The trunk: follow the names that mlx-lm gives to what stands inside the head. None if there is none."""
    trunk = None
    current = module
    while True:
        inner = next((getattr(current, name) for name in _INNER if hasattr(current, name)), None)
        if not isinstance(inner, nn.Module):
            return trunk
        trunk = current = inner


_taps = threading.local()
"""`tap` of the forward that a thread is in: engines in several threads may share a module."""


def _install_tap(trunk: nn.Module) -> None:
    """Let a thread's tap, where one is set, decide what the trunk returns. Parameters and class name stay."""
    base = type(trunk)
    if hasattr(base, "labkit_tapped"):
        return

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        states = base.__call__(self, *args, **kwargs)
        tap = getattr(_taps, "tap", None)
        return states if tap is None else tap(states)

    trunk.__class__ = type(base.__name__, (base,), {"__call__": call, "labkit_tapped": True})


def activation_dtype(parameters: Iterable[mx.array]) -> mx.Dtype:
    """The dtype that most floating parameters have (codes of quantised weights are integers)."""
    counts: dict[mx.Dtype, int] = {}
    for parameter in parameters:
        if mx.issubdtype(parameter.dtype, mx.floating):
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + 1
    return max(counts, key=counts.get) if counts else mx.float32
