"""Watched pauses see what every token was chosen from, whichever graph answers and however the engine chooses."""

from __future__ import annotations

import numpy as np
import pytest

import labkit
from labkit.engine import SamplingParams
from labkit.measure.watched_pauses import Watched


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "sampled"])
@pytest.mark.parametrize("graph", ["auto", "adapter"])
def test_every_step_is_seen_once_and_bit_for_bit_behind_a_pause(graph, temperature):
    loaded = labkit.load("tiny-hybrid", graph=graph)
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=temperature, seed=3)
    plain, paused = (Watched(loaded, [5, 6, 7, 8, 9], params, at, width=4) for at in ((), (2, 4)))
    assert paused.count("paused") == 2
    assert paused.tokens == plain.tokens
    for run in (plain, paused):
        assert {step: len(logits) for step, logits in run.logits.items()} == dict.fromkeys(range(6), 1)
    for step in range(6):
        assert np.array_equal(plain.logits[step][0], paused.logits[step][0])
        if temperature == 0:
            assert plain.logits[step][0].argmax() == plain.tokens[step]
