"""Steps of one token a row in compiled loops: their arguments are kept, and nothing but time depends on that."""

from __future__ import annotations

import gc
import threading
from weakref import ref

import mlx.core as mx
import numpy as np
import pytest

from labkit.models import Rows
from labkit.models.hybrid.native import NativeHybrid
from tests.models.hybrid.native_model import native
from tests.models.hybrid.small import prompt

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="loops for machines whose device is the CPU")

PROMPT, STEPS = 20, 12


class Row:
    """A conversation, and the logits that its tokens give wherever they are computed."""

    def __init__(self, model: NativeHybrid, seed: int):
        self.model, self.caches, tokens = model, model.make_caches(), prompt(PROMPT + STEPS, seed)
        self.wanted = np.array(model(tokens, model.make_caches(), Rows.single(), logits="all").logits)[0, PROMPT:]
        model(tokens[:, :PROMPT], self.caches, Rows.single(), logits=None)
        self.tokens = tokens[0].tolist()
        self.position = PROMPT

    def step(self) -> bool:
        """One token more; whether its logits have the bits that they should have."""
        at, self.position = self.position, self.position + 1
        logits = self.model(mx.array([[self.tokens[at]]]), self.caches, Rows.single(at)).logits
        return np.array_equal(np.array(logits)[0, 0], self.wanted[at - PROMPT])


@pytest.mark.parametrize(("kind", "bits"), [("sparse", 4), ("dense", None), ("hybrid-moe", None)])
def test_steps_have_the_bits_of_a_prompt_and_keep_their_arguments(kind, bits):
    row, steps = Row(native(kind, bits), 1), []
    for _ in range(STEPS):
        assert row.step()
        steps.append(row.model._kept)
    assert all(step is steps[0] for step in steps)


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_several_lengths_step_together_and_come_and_go(threads):
    rows = [Row(native(threads=threads), seed) for seed in range(3)]
    for ahead in range(2):
        for _ in range(2 * ahead):
            assert rows[ahead].step()
    caches = [type(layer[0]).merge(layer) for layer in zip(*(row.caches for row in rows), strict=True)]

    def step(numbers: list[int]) -> None:
        tokens = mx.array([[rows[i].tokens[rows[i].position]] for i in numbers])
        logits = rows[0].model(tokens, caches, Rows.batch([rows[i].position for i in numbers])).logits
        for place, i in enumerate(numbers):
            assert np.array_equal(np.array(logits[place, 0]), rows[i].wanted[rows[i].position - PROMPT])
            rows[i].position += 1

    step([0, 1, 2])
    first = rows[0].model._kept
    step([0, 1, 2])
    assert rows[0].model._kept is first
    for cache in caches:
        cache.filter([0, 2])
    step([0, 2])
    second = rows[0].model._kept
    assert second is not first
    step([0, 2])
    assert rows[0].model._kept is second


def lent(row: Row) -> list:
    return [cache.state for cache in row.caches]


def copied(row: Row) -> None:
    row.caches = [cache.copy() for cache in row.caches]


def taken_back(row: Row) -> None:
    """Two tokens are fed, and the caches brought back to where they were."""
    for cache in row.caches:
        cache.checkpoint()
    for other in (3, 4):
        row.model(mx.array([[other]]), row.caches, Rows.single(row.position + other - 3))
    for cache in row.caches:
        cache.commit(0)


def restored(row: Row) -> None:
    row.caches = [type(cache).restore(cache.snapshot()) for cache in row.caches]


def prompted_meanwhile(row: Row) -> None:
    Row(row.model, 5)


def stepped_meanwhile(row: Row) -> None:
    assert Row(row.model, 6).step()


@pytest.mark.parametrize("between", [lent, copied, taken_back, restored, prompted_meanwhile, stepped_meanwhile])
def test_whatever_happens_between_two_steps(between):
    row = Row(native(), 2)
    for _ in range(STEPS // 3):
        assert row.step()
        assert row.step()
        between(row)
        assert row.step()


def test_the_buffers_of_a_long_answer_grow():
    model = native()
    tokens = prompt(270, 3)
    wanted = model(tokens, model.make_caches(), Rows.single(), logits="all").logits
    caches = model.make_caches()
    model(tokens[:, :250], caches, Rows.single(), logits=None)
    for at in range(250, 270):
        assert mx.array_equal(model(tokens[:, at : at + 1], caches, Rows.single(at)).logits[0, 0], wanted[0, at])


def test_logits_that_were_given_never_change():
    row = Row(native(), 4)
    places = (PROMPT, PROMPT + 1, PROMPT + 2)
    given = [row.model(mx.array([[row.tokens[at]]]), row.caches, Rows.single(at)).logits for at in places]
    for logits, wanted in zip(given, row.wanted, strict=False):
        assert np.array_equal(np.array(logits)[0, 0], wanted)


def test_kept_arguments_keep_no_memory_of_caches():
    row = Row(native(), 1)
    assert row.step()
    memory = [ref(array) for cache in row.caches for array in cache._host.arrays]
    del row
    gc.collect()
    assert len(memory) >= 8
    assert all(array() is None for array in memory)


def test_two_threads_step_on_one_model():
    model, failed, begin = native(), [], threading.Barrier(4)
    rows = [Row(model, seed) for seed in range(4)]

    def run(row: Row) -> None:
        begin.wait()
        failed.extend(row.position for _ in range(STEPS) if not row.step())

    threads = [threading.Thread(target=run, args=(row,)) for row in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [row.position for row in rows] == [PROMPT + STEPS] * 4
    assert not failed


def test_a_step_that_is_refused_leaves_the_next_one_right():
    row = Row(native(), 7)
    assert row.step()
    with pytest.raises(ValueError, match="tokens 320 to 320 of a vocabulary of 320"):
        row.model(mx.array([[320]]), row.caches, Rows.single(row.position))
    with pytest.raises(ValueError, match="begin at positions"):
        row.model(mx.array([[1]]), row.caches, Rows.single(row.position + 1))
    assert row.step()
