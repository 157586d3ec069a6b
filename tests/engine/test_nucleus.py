"""The most likely tokens without a sort of all: the same ones as with it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_top_p

from labkit.engine import SamplingParams, nucleus, sampling
from labkit.engine.sampling import RowSampler, choose

KINDS = ("normal", "ties", "flat", "peaked", "masked", "one left")


def rows(kind: str, size: int, seed: int, batch: int = 3) -> mx.array:
    """Log-probabilities [batch, size]."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(batch, size)) * {"flat": 0, "peaked": 9}.get(kind, 2)
    if kind == "ties":
        logits = np.round(logits)
    if kind == "masked":
        logits[:, generator.random(size) < 0.6] = -np.inf
        logits[:, 0] = 0
    if kind == "one left":
        logits[:, 1:] = -np.inf
    logits = mx.array(logits.astype(np.float32))
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def by_sorting(row: np.ndarray, top_p: float) -> np.ndarray:
    """Which tokens are kept: all of them in order, one by one, until the mass is reached."""
    order = np.argsort(-row, kind="stable")
    wanted = top_p * np.exp(row).sum(dtype=np.float64)
    mass, kept = 0.0, np.zeros(len(row), bool)
    for token in order:
        if mass >= wanted:
            break
        kept[token] = True
        mass += float(np.exp(row[token]))
    return row >= row[kept].min()


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(KINDS),
    size=st.sampled_from([1, 2, 9, 255, 256, 257, 3000]),
    seed=st.integers(0, 99),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-9]),
    first=st.sampled_from([1, 4, 256]),
)
def test_a_nucleus_is_that_of_a_full_sort(kind, size, seed, top_p, first):
    logprobs = rows(kind, size, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nucleus, "FIRST", first)
        found = np.array(nucleus.apply_top_p(logprobs, top_p))
    for row, kept in zip(np.array(logprobs), found, strict=True):
        expected = by_sorting(row, top_p)
        assert np.array_equal(kept > -np.inf, expected & (row > -np.inf))
        assert np.array_equal(kept[expected], row[expected])


@pytest.fixture
def uncompiled():
    """mlx-lm's function as it is: compiled for a CPU, each mass takes a C++ compiler some seconds."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_nucleus_is_mlx_lms(kind, dtype):
    logprobs = rows(kind, 1000, 5).astype(dtype)
    for top_p in (0.05, 0.37, 0.8, 0.95):
        ours, theirs = nucleus.apply_top_p(logprobs, top_p), apply_top_p(logprobs, top_p)
        if kind == "flat":  # where the mass ends is rounding alone: both keep whatever is as likely as the last
            assert (ours > -mx.inf).all()
        assert ours.dtype == dtype
        assert mx.array_equal(ours, theirs), top_p


def test_broken_logits_end():
    logprobs = mx.array([[np.nan] * 600, [-np.inf] * 600], dtype=mx.float32)
    assert nucleus.apply_top_p(logprobs, 0.5).shape == (2, 600)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 3, 20])
def test_top_k_keeps_as_many_as_it_says(kind, count):
    logprobs = rows(kind, 500, 3)
    found = np.array(nucleus.apply_top_k(logprobs, count))
    for row, kept in zip(np.array(logprobs), found, strict=True):
        chosen = np.sort(np.argsort(-row, kind="stable")[:count])
        assert np.array_equal(kept[chosen], row[chosen])
        assert np.isneginf(np.delete(kept, chosen)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 3, 20])
def test_the_best_are_those_of_a_stable_sort(kind, count):
    row = rows(kind, 500, 2)[0]
    expected = np.argsort(-np.array(row), kind="stable")[:count]
    assert nucleus.best(row, count).tolist() == expected.tolist()
    assert mx.argsort(-row)[:count].tolist() == expected.tolist(), "as a GPU's rows are told"


def test_rows_without_a_nucleus_do_not_pay_for_those_with_one(monkeypatch):
    seen = []
    monkeypatch.setattr(nucleus, "apply_top_p", lambda logprobs, p: (seen.append((logprobs.shape[0], p)), logprobs)[1])
    monkeypatch.setattr(sampling, "target_in_use", lambda: None)
    options = [{"temperature": 0.0}, {"top_p": 0.9}, {}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_p": 0.5, "logprobs": 2}]
    samplers = [RowSampler(SamplingParams(**{"temperature": 1.0, **asked}), seed) for seed, asked in enumerate(options)]
    logits = mx.random.normal((6, 50), key=mx.random.key(0))
    chosen = choose(logits, mx.zeros((6,), mx.int32), samplers, [0] * 6, [None] * 6)
    assert chosen.token.shape == (6,)
    assert seen == [(2, 0.9), (1, 0.5)]
