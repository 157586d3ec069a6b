"""The specialised graph over paged caches: with its kernels' references, what it computes over plain ones."""

from __future__ import annotations

import mlx.core as mx
import pytest

import labkit.models.hybrid.decode as decode
from labkit.caches import PagedKV
from labkit.kernels import use_target
from labkit.models import Rows
from labkit.models.hybrid.variants import Variants
from tests.models.hybrid.small import models, prompt

TOLERANCE = 5e-4


def paged(model, block: int, tail: int) -> PagedKV:
    return PagedKV(model.make_caches(), model.layouts, pool_bytes=1 << 24, block_tokens=block, tail_tokens=tail)


@pytest.mark.parametrize(("block", "tail", "few"), [(8, 16, True), (16, 16, False)])
def test_prompts_and_steps_of_rows_that_join_and_leave(monkeypatch, block, tail, few):
    model = models("sparse", 4).hybrid
    model.variants = Variants(compiled=False)
    pools, together = paged(model, block, tail), []
    monkeypatch.setattr(decode.FewTokens, "__call__", counting(decode.FewTokens.__call__, together))

    def forward(caches: list, tokens: mx.array, positions: list[int]) -> mx.array:
        return model(tokens, caches, Rows.batch(positions), logits="all").logits

    def agree(plain: list, pages: list, tokens: mx.array, positions: list[int]) -> None:
        wanted, got = forward(plain, tokens, positions), forward(pages, tokens, positions)
        assert mx.abs(got - wanted).max().item() <= TOLERANCE

    with use_target("reference"):
        rows = []
        for length in (13, 30, 5):
            plain, pages = model.make_caches(), pools.make_caches(total=60)[0]
            for start in range(0, length, 12):
                agree(plain, pages, prompt(min(12, length - start), start), [start])
            rows.append((plain, pages))
        plain, pages = (
            [type(layer[0]).merge(layer) for layer in zip(*side, strict=True)] for side in zip(*rows, strict=True)
        )
        lengths = [13, 30, 5]
        for step, width in enumerate((1, 1, 3, 1, 1, 4, 1, 1, 1, 1)):
            tokens = mx.concatenate([prompt(width, 7 * step + b) for b in range(len(lengths))])
            agree(plain, pages, tokens, lengths)
            lengths = [length + width for length in lengths]
            if step == 5:
                for cache in (*plain, *pages):
                    cache.filter([2, 0])
                lengths = [lengths[2], lengths[0]]
    del rows, plain
    assert pools.faults() == []
    assert (True in together) == few  # pages went through the function of arrays
    for cache in pages:
        cache.release()
    del pages, cache
    assert pools.used == 0


def counting(call, seen: list[bool]):
    """Note, for each forward of a few tokens, whether its caches were paged."""

    def counted(self, x, caches, step, **options):
        seen.append(any(hasattr(cache, "pages") for cache in caches))
        return call(self, x, caches, step, **options)

    return counted
