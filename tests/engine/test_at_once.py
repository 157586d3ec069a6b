"""Tokens that the host chooses by itself are those that MLX would choose, or it does not choose."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from labkit.engine import Engine, Request, SamplingParams, batch
from labkit.engine.at_once import likeliest
from labkit.engine.sampling import RowSampler, choose

ROWS, VOCABULARY = 4, 1000


def samplers(count: int = ROWS, **options) -> list[RowSampler]:
    return [RowSampler(SamplingParams(max_tokens=3, **{"temperature": 0.0, **options}), 1) for _ in range(count)]


def by_mlx(logits: np.ndarray) -> list[int]:
    fed, rows = mx.zeros((len(logits),), mx.uint32), samplers(len(logits))
    return choose(mx.array(logits), fed, rows, [0] * len(rows), [None] * len(rows)).token.tolist()


def by_host(logits: np.ndarray, rows: list[RowSampler] | None = None, masks: list | None = None) -> list[int] | None:
    rows = rows or samplers(len(logits))
    choice = likeliest(mx.array(logits[:, None]), rows, masks or [None] * len(rows))
    return None if choice is None else choice.token.tolist()


@pytest.fixture(autouse=True)
def on_a_cpu():
    if mx.default_device() != mx.cpu:
        pytest.skip("the host chooses where the CPU computes")


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4])
def test_the_same_tokens(scale):
    for seed in range(20):
        logits = (scale * np.random.RandomState(seed).randn(ROWS, VOCABULARY)).astype(np.float32)
        got = by_host(logits)
        assert got is None or got == by_mlx(logits)
        assert got is not None or scale != 1.0


@pytest.mark.parametrize("top", [0.001, 0.4, 3.0, 17.0])
def test_near_ties_are_left_to_mlx(top):
    """The later of two is larger by a little: log-probabilities may be equal, and then the first counts."""
    flipped = 0
    for units in range(12):
        for seed in range(10):
            random = np.random.RandomState(seed)
            logits = np.full((1, VOCABULARY), top, np.float32) - 0.01 - random.rand(1, VOCABULARY).astype(np.float32)
            first, later = np.sort(random.choice(VOCABULARY, 2, replace=False))
            logits[0, first] = logits[0, later] = top
            for _ in range(2**units - 1):
                logits[0, later] = np.nextafter(logits[0, later], np.float32(np.inf))
                if logits[0, later] - logits[0, first] > 1e-4:
                    break
            wanted, got = by_mlx(logits), by_host(logits)
            assert got is None or got == wanted
            flipped += wanted != [later]
    assert flipped or top > 10


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_broken_logits_are_left_to_mlx_and_forbidden_ones_are_not(broken):
    logits = np.random.RandomState(0).randn(ROWS, VOCABULARY).astype(np.float32)
    logits[:, :500] = -np.inf
    assert by_host(logits) == by_mlx(logits)
    logits[2, 700] = broken
    assert by_host(logits) is None


def test_other_wishes_are_left_to_mlx():
    logits = np.random.RandomState(0).randn(ROWS, VOCABULARY).astype(np.float32)
    for options in ({"temperature": 0.7}, {"logprobs": 2}, {"repetition_penalty": 1.3}, {"logit_bias": {3: 1.0}}):
        assert by_host(logits, samplers(3) + samplers(1, **options)) is None
    words = mx.full((-(-VOCABULARY // 32),), 5, mx.uint32)
    assert by_host(logits, masks=[None, None, words, None]) is None


def test_an_engine_answers_the_same_and_asks_the_host(tiny_native, monkeypatch):
    def answers() -> list[tuple]:
        engine = Engine(tiny_native)
        for number, options in enumerate(({"temperature": 0.8, "seed": 3}, {}, {})):
            params = SamplingParams(max_tokens=12 + 4 * number, ignore_eos=True, **{"temperature": 0.0, **options})
            engine.submit(Request(tokens=tuple(range(5, 25 + 9 * number)), params=params, id=str(number)))
        events = []
        while not engine.idle:
            events += engine.step()
        return [(e.request, e.token, e.text) for e in sorted(events, key=lambda e: e.request) if e.kind == "token"]

    asked: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr(batch, "likeliest", lambda *a: asked.append((got := likeliest(*a)) is not None) or got)
        ours = answers()
    monkeypatch.setattr(batch, "likeliest", lambda *a: None)
    assert answers() == ours
    assert len(ours) == 12 + 16 + 20
    assert {True, False} <= set(asked)


@pytest.fixture(scope="module")
def tiny_native():
    import labkit

    return labkit.load("tiny-hybrid", graph="native")
