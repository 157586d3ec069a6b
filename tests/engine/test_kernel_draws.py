"""Rows that kernels choose for: one computation for all, each row as if it were alone."""

from __future__ import annotations

import math
import threading

import mlx.core as mx
import pytest

from labkit.engine import kernel_draws
from labkit.engine.params import SamplingParams
from labkit.engine.sampling import RowSampler, choose
from labkit.kernels import use_target

VOCABULARY = 100
PARAMS = {
    "greedy": SamplingParams(max_tokens=1, temperature=0),
    "plain": SamplingParams(max_tokens=1, temperature=0.8),
    "filtered": SamplingParams(max_tokens=1, temperature=1.3, top_k=20, top_p=0.9, min_p=0.01),
    "one of one": SamplingParams(max_tokens=1, temperature=2.0, top_k=1),
    "logprobs": SamplingParams(max_tokens=1, temperature=0.5, logprobs=2),
    "penalised": SamplingParams(max_tokens=1, temperature=0, repetition_penalty=1.5),
    "kept by number": SamplingParams(max_tokens=1, temperature=0.5, min_p=0.5, min_tokens_to_keep=3),
}


@pytest.fixture(autouse=True)
def kernels():
    kernel_draws._made.__dict__.clear()
    with use_target("reference"):
        yield


def logits(rows: int, seed: int = 0) -> mx.array:
    return 3 * mx.random.normal((rows, VOCABULARY), key=mx.random.key(seed))


def rows_of(names: list[str]) -> list[RowSampler]:
    return [RowSampler(PARAMS[name], seed=10 + i) for i, name in enumerate(names)]


def chosen(scores: mx.array, rows: list[RowSampler], steps: list[int], masks: list | None = None):
    return choose(scores, mx.zeros((len(rows),), mx.int32), rows, steps, masks or [None] * len(rows))


def test_who_goes_to_the_kernels():
    going = {name for name in PARAMS if rows_of([name])[0].for_kernels is not None}
    assert going == {"greedy", "plain", "filtered", "one of one"}


def test_each_row_gets_what_it_gets_alone_whoever_stands_beside_it():
    names = list(PARAMS)
    scores, rows, steps = logits(len(names)), rows_of(names), [3 + i for i in range(len(names))]
    together = chosen(scores, rows, steps)
    for i, row in enumerate(rows_of(names)):
        # Its own state (recent tokens) is fresh: a penalised row must not have looked twice.
        alone = choose(scores[i : i + 1], mx.zeros((1,), mx.int32), [row], [steps[i]], [None])
        assert together.token[i].item() == alone.token.item(), names[i]
    assert not together.failed
    assert [one is not None for one in together.logprob] == [name == "logprobs" for name in names]


def test_the_likeliest_and_only_what_filters_and_masks_permit():
    scores, rows = logits(3), rows_of(["greedy", "one of one", "plain"])
    best = mx.argmax(scores, axis=-1).tolist()
    assert chosen(scores, rows, [1, 1, 1]).token.tolist()[:2] == best[:2]
    allowed = [7, 40, 99]
    words = [sum(1 << token % 32 for token in allowed if token // 32 == word) for word in range(4)]
    mask = mx.array(words, dtype=mx.uint32)
    for step in range(20):
        tokens = chosen(scores, rows, [step] * 3, [mask, None, mask]).token.tolist()
        assert tokens[0] == max(allowed, key=lambda token: scores[0, token].item())
        assert tokens[1] == best[1]
        assert tokens[2] in allowed


def test_a_draw_is_its_seed_and_step():
    scores, rows = mx.repeat(logits(1), 2, axis=0), rows_of(["plain", "plain"])
    texts = list(zip(*(chosen(scores, rows, [step, step]).token.tolist() for step in range(40)), strict=True))
    again = list(zip(*(chosen(scores, rows, [step, step]).token.tolist() for step in range(40)), strict=True))
    assert texts == again
    assert texts[0] != texts[1]
    assert len(set(texts[0])) > 5
    assert [chosen(scores[:1], rows[:1], [step]).token.item() for step in (30, 7)] == [texts[0][30], texts[0][7]]


def test_broken_logits_are_seen():
    scores = logits(3)
    scores[1] = mx.nan
    scores[2] = -mx.inf
    total = chosen(scores, rows_of(["greedy", "plain", "greedy"]), [0, 0, 0]).total.tolist()
    assert [math.isfinite(value) for value in total] == [True, False, False]


def test_options_are_laid_out_once_while_the_same_rows_decode(monkeypatch):
    made = []
    monkeypatch.setattr(kernel_draws, "on_device", lambda array: made.append(array.shape) or array)
    rows = rows_of(["greedy", "plain", "filtered"])
    for step in range(10):
        chosen(logits(3, step), rows, [step, step + 5, step + 9])
    assert len(made) == len(kernel_draws.Options._fields) + 1
    chosen(logits(2), rows[:2], [10, 15])
    assert len(made) == 2 * (len(kernel_draws.Options._fields) + 1)


def test_engines_in_two_threads_may_decode_equal_rows():
    """One thread's steps are counted in arrays that it has not evaluated: another thread cannot."""
    rows = (rows_of(["plain"])[0].for_kernels,)
    told = []

    def decode(steps):
        counted = [kernel_draws._table(rows).steps((step,)) for step in steps]
        told.append(counted[-1].item() if steps[0] else None)

    for steps in ([0, 1], [2, 3]):  # the second goes on where the first one stands
        thread = threading.Thread(target=decode, args=(steps,))
        thread.start()
        thread.join()
    assert told == [None, 3]
