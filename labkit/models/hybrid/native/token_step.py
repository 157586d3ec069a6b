"""Rows that feed one token each, on the same caches step after step: what native code reads is laid out once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from labkit.caches import Cache
from labkit.kernels.workers import Workers
from labkit.models.hybrid.native.cache_records import CacheRecords
from labkit.models.hybrid.native.forward import Arguments, Layers
from labkit.models.hybrid.native.spans import Spans


class TokenStep:
    """The arguments of such a step. The next one writes its tokens, positions and columns into them, and goes.

    To lay them out anew takes as long as a tenth of a small model's step. They keep no memory of the caches.

    Args:
        caches: without a checkpoint.
        spans: of one token a row, none of them padding.

    Attributes:
        x: float32 [B, D], where the tokens' embeddings belong.
    """

    def __init__(self, layers: Layers, caches: Sequence[Cache], spans: Spans):
        self._count, self._caches = spans.count, CacheRecords(caches, spans)
        self.x = np.empty((spans.count, int(layers.model["width"][0])), np.float32)
        self._arguments = Arguments(layers, spans, self.x, self._caches, spans.starts[:-1].copy())

    def again(self, caches: Sequence[Cache], count: int) -> bool:
        """Whether this is the step of these `count` rows too; it stands where the caches do then."""
        return count == self._count and self._caches.again(caches)

    def run(self, positions: np.ndarray, workers: Workers) -> np.ndarray:
        """`x` through all layers, each row at its position, int64 [B] -> logits [B, V padded]."""
        self._arguments.stand_at(positions)
        logits = self._arguments.new_logits()
        self._arguments.rows(self._count, workers)
        return logits
