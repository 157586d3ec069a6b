"""The forward contract (the first of the five): the interface that every model implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import mlx.core as mx

from labkit.caches import Cache, Layout
from labkit.models.rows import Rows

LogitsFor = Literal["last", "all"] | None | mx.array
LayerKind = Literal["full_attention", "sliding_attention", "linear_attention", "other"]


class Output(NamedTuple):
    """logits [B, n, V] at the positions asked for, or None; hidden [B, L, D], what enters the head, if asked for."""

    logits: mx.array | None
    hidden: mx.array | None


@runtime_checkable
class Model(Protocol):
    """Weights that turn tokens into logits, for any number of rows. It keeps nothing between calls but its weights.

    Attributes:
        config: the checkpoint's config.json.
        vocab_size: V, columns of the logits (which may exceed the tokenizer's vocabulary).
        num_layers: layers.
        layer_kinds: one of "full_attention", "sliding_attention", "linear_attention", "other" for each cache.
        layouts: the arrays of each cache, known before any token has passed; None for a kind that cannot say.
        dtype: the activations' dtype.
        splits_head: whether only the asked-for positions go through the head (else all do, and are sliced after).
        accepts_embeddings: whether `embeddings` may stand in for tokens.
        batches: whether rows of several lengths can run together.
        limits: cache operation -> kinds of cache in this model that cannot do it.
    """

    config: dict[str, Any]
    vocab_size: int
    num_layers: int
    layer_kinds: Sequence[LayerKind]
    layouts: Sequence[Layout | None]
    dtype: mx.Dtype
    splits_head: bool
    accepts_embeddings: bool
    batches: bool
    limits: dict[str, tuple[str, ...]]

    def make_caches(self, batch: int = 1) -> list[Cache]:
        """Empty caches, one a layer that has one: of the serial classes for one row, of the batched ones for more."""
        ...

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
        """One forward: L is 1 (decode), a few (verification) or a chunk (prefill).

        Args:
            tokens: int32 [B, L].
            caches: from `make_caches`, or merged from such; updated.
            rows: where the rows stand; read before any cache is updated.
            logits: the positions that go through the head: the last valid one of each row, all, none, or these
                columns, int32 [B, n].
            hidden: whether to return what enters the head, for all columns.
            embeddings: [B, L, D], in place of the tokens' own.

        Raises:
            ValueError: shapes, rows or caches that do not fit together.
        """
        ...


def select_columns(x: mx.array, logits: LogitsFor, lengths: mx.array | None) -> mx.array:
    """x [B, L, D] at the columns that `logits` asks for -> [B, n, D]; without any it is the last column."""
    if isinstance(logits, mx.array):
        return mx.take_along_axis(x, logits[..., None].astype(mx.int32), axis=1)
    if logits == "all" or x.shape[1] == 1:
        return x
    if logits is None or lengths is None:
        return x[:, -1:, :]
    return mx.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
