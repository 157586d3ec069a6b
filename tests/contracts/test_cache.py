"""Contract 2, caches: both faces agree, and every class either does an operation or says beforehand that it cannot."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from labkit.caches import OPERATIONS, Cache, Contiguous, Rotating
from labkit.models import Rows
from tests.tiny_models import CONFIGS, adapter

# What mlx-lm's modules and its batch generator touch.
MLX_FACE = {
    "make_mask",
    "state",
    "meta_state",
    "nbytes",
    "is_trimmable",
    "trim",
    "size",
    "empty",
    "prepare",
    "finalize",
}
MLX_FACE |= {"advance", "merge", "extend", "filter", "extract"}
KERNEL_FACE = {"append", "attend", "checkpoint", "commit", "rollback", "snapshot", "restore", "bytes_for", "layout"}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("batch", [1, 2])
def test_every_cache_of_every_model_has_both_faces(name, batch):
    model = adapter(name)
    if batch > 1 and not model.batches:
        return
    for cache in model.make_caches(batch):
        assert isinstance(cache, Cache)
        assert cache.supports <= OPERATIONS
        for attribute in MLX_FACE | KERNEL_FACE:
            assert hasattr(cache, attribute), (cache.kind, attribute)
        if cache.kind in ("contiguous", "rotating"):
            assert hasattr(cache, "update_and_fetch")
            assert hasattr(cache, "offset")
        if cache.kind == "recurrent":
            assert cache[0] is None
            assert cache.lengths is None


@pytest.mark.parametrize("make", [Contiguous, lambda: Rotating(8)], ids=["contiguous", "rotating"])
@pytest.mark.parametrize("batched", [False, True])
def test_both_faces_give_the_same_attention(make, batched):
    def step(seed: int, length: int) -> tuple[mx.array, mx.array, mx.array]:
        shape = (2 if batched else 1, 2, length, 8)
        return tuple(mx.random.normal(shape, key=key) for key in mx.random.split(mx.random.key(seed), 3))

    mlx_face, kernel_face = make(), make()
    if batched:
        rows = [make(), make()]
        for cache, length in zip(rows, (3, 6), strict=True):
            cache.update_and_fetch(*[mx.random.normal((1, 2, length, 8), key=mx.random.key(length))] * 2)
        mlx_face, kernel_face = (type(rows[0]).merge(rows) for _ in range(2))
    for seed, length in enumerate([4, 1, 1, 5, 1, 1, 1, 1, 1, 1, 1, 1, 2, 1]):
        queries, keys, values = step(seed, length)
        mask = mlx_face.make_mask(length, return_array=True) if length > 1 or batched else mlx_face.make_mask(1)
        k, v = mlx_face.update_and_fetch(keys, values)
        wanted = mx.fast.scaled_dot_product_attention(queries, k, v, scale=0.3, mask=mask)
        kernel_face.append(keys, values)
        np.testing.assert_allclose(kernel_face.attend(queries, scale=0.3), wanted, atol=2e-6)


def test_decode_through_the_kernel_face_keeps_one_shape():
    cache = Contiguous()
    cache.append(*[mx.zeros((1, 2, 5, 8))] * 2)
    shapes = set()
    for _ in range(200):
        cache.append(*[mx.zeros((1, 2, 1, 8))] * 2)
        shapes.add(tuple(cache.keys.shape))
    assert shapes == {(1, 2, 256, 8)}
    cache.reserve(1000)
    assert cache.keys.shape[2] == 1024


@pytest.mark.parametrize("name", ["llama", "sliding", "hybrid"])
def test_a_span_taken_back_leaves_no_trace(name):
    model = adapter(name)
    prompt = mx.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]])

    def warm() -> list[Cache]:
        caches = model.make_caches()
        model(prompt, caches, Rows.single(), logits=None)
        return caches

    plain, tried = warm(), warm()
    for cache in tried:
        cache.checkpoint()
    model(mx.array([[7, 7, 7, 7]]), tried, Rows.single(11), logits=None)
    for cache in tried:
        cache.rollback()
    token = mx.array([[8]])
    wanted = model(token, plain, Rows.single(11)).logits
    assert mx.array_equal(model(token, tried, Rows.single(11)).logits, wanted)


@pytest.mark.parametrize("name", ["llama", "sliding"])
def test_a_part_of_a_span_is_kept(name):
    model = adapter(name)
    prompt, span = mx.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]), mx.array([[7, 2, 8, 1]])
    caches, straight = model.make_caches(), model.make_caches()
    for kept in (caches, straight):
        model(prompt, kept, Rows.single(), logits=None)
    for cache in caches:
        cache.checkpoint()
    model(span, caches, Rows.single(11), logits=None)
    for cache in caches:
        cache.commit(2)
    model(span[:, :2], straight, Rows.single(11), logits=None)
    token = mx.array([[8]])
    wanted = model(token, straight, Rows.single(13)).logits
    np.testing.assert_allclose(model(token, caches, Rows.single(13)).logits, wanted, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "sliding", "hybrid"])
def test_a_snapshot_continues_with_the_same_bits(name):
    model = adapter(name)
    caches = model.make_caches()
    model(mx.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]), caches, Rows.single(), logits=None)
    stored = [(type(cache), cache.snapshot(), layout) for cache, layout in zip(caches, model.layouts, strict=True)]
    restored = [kind.restore(data, layout) for kind, data, layout in stored]
    for position, token in enumerate((8, 2, 7), start=11):
        tokens = mx.array([[token]])
        wanted = model(tokens, caches, Rows.single(position)).logits
        assert mx.array_equal(model(tokens, restored, Rows.single(position)).logits, wanted)


def test_a_shorter_common_prefix_is_never_made_by_trimming_a_recurrent_state():
    # A hybrid whose attention was trimmed while its states kept the longer text answered for the wrong prompt.
    model = adapter("hybrid")
    assert "recurrent" in model.limits["trim"]
    caches = model.make_caches()
    model(mx.array([[1, 2, 3, 4]]), caches, Rows.single(), logits=None)
    assert not all(cache.is_trimmable() for cache in caches)
    with pytest.raises(NotImplementedError, match="recurrent"):
        next(cache for cache in caches if not cache.is_trimmable()).trim(2)
