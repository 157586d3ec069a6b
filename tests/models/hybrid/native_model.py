"""Small random hybrids in compiled loops, and what their tests compare."""

from __future__ import annotations

from functools import cache as kept_once

import mlx.core as mx

from labkit.models import Rows
from labkit.models.hybrid.native import NativeHybrid
from tests.models.hybrid.small import models


@kept_once
def native(kind: str = "sparse", bits: int | None = 4, threads: int = 1) -> NativeHybrid:
    both = models(kind, bits)
    return NativeHybrid.from_module(both.module, both.adapter.config, threads=threads)


def whole(model, tokens: mx.array) -> tuple[mx.array, list]:
    caches = model.make_caches()
    return model(tokens, caches, Rows.single(), logits="all").logits, caches


def same_content(one: list, other: list) -> bool:
    packs = [(a._pack(), b._pack()) for a, b in zip(one, other, strict=True)]
    return all(
        a[1] == b[1] and a[0].keys() == b[0].keys() and all(mx.array_equal(a[0][k], b[0][k]) for k in a[0])
        for a, b in packs
    )
