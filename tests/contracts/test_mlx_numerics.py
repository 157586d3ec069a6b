"""What MLX itself must get right for everything above: three faults that releases of it have had."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

LENGTHS = st.integers(1, 9)


@pytest.mark.parametrize("rows", range(1, 9))
def test_trap_40_quantised_products_over_a_broadcast_axis(rows):
    """Heads that share keys: through an axis of stride 0, and with the keys repeated in memory."""
    rng = np.random.default_rng(rows)
    keys = mx.quantize(mx.array(rng.normal(size=(1, 2, 1, 24, 64)).astype(np.float32)), group_size=32, bits=8)
    queries = mx.array(rng.normal(size=(1, 2, 3, rows, 64)).astype(np.float32))
    form = {"transpose": True, "group_size": 32, "bits": 8}
    shared = mx.quantized_matmul(queries, *(mx.broadcast_to(a, (1, 2, 3, *a.shape[3:])) for a in keys), **form)
    repeated = mx.quantized_matmul(queries, *(mx.contiguous(mx.repeat(a, 3, axis=2)) for a in keys), **form)
    alone = mx.quantized_matmul(queries, *keys, **form)
    assert mx.abs(shared - repeated).max() < 1e-4
    assert mx.abs(alone - repeated).max() < 1e-4


@pytest.mark.parametrize("scores", [[0.0, 1.0, 2.0], [-1e4, 0.0, 1e4]])
def test_trap_43_a_row_that_may_see_nothing_is_finite_and_leaves_others_alone(scores):
    keys = mx.array(scores).reshape(1, 1, 3, 1) * mx.ones((1, 1, 1, 8))
    queries = mx.ones((1, 1, 2, 8))
    sees = mx.array([[True, True, False], [False, False, False]])[None, None]
    found = mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.1, mask=sees)
    alone = mx.fast.scaled_dot_product_attention(queries[:, :, :1], keys, keys, scale=0.1, mask=sees[:, :, :1])
    assert mx.isfinite(found).all()
    assert mx.allclose(found[:, :, :1], alone, atol=1e-5)


@settings(deadline=None, max_examples=25)
@given(queries=LENGTHS, columns=LENGTHS, groups=st.integers(1, 3), seed=st.integers(0, 999))
def test_trap_45_attention_under_a_mask_is_the_written_out_one(queries, columns, groups, seed):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape)
    q, k, v = draw(2, 2 * groups, queries, 8), draw(2, 2, columns, 8), draw(2, 2, columns, 8)
    sees = rng.random((2, 1, queries, columns)) < 0.5
    sees[..., 0] = True
    scores = 0.3 * q @ np.repeat(k, groups, axis=1).swapaxes(-1, -2)
    weights = np.exp(np.where(sees, scores, -np.inf))
    wanted = weights / weights.sum(axis=-1, keepdims=True) @ np.repeat(v, groups, axis=1)
    arrays = (mx.array(a.astype(np.float32)) for a in (q, k, v))
    found = mx.fast.scaled_dot_product_attention(*arrays, scale=0.3, mask=mx.array(sees))
    assert np.abs(np.array(found) - wanted).max() < 1e-5
