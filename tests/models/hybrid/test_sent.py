"""A prompt's layers, sent to a GPU while the host builds the next ones: the same bits, and nothing under a trace."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from labkit.measure.trace import capture
from labkit.models import Rows
from labkit.models.hybrid import graph
from tests.models.hybrid.small import models, prompt


@pytest.fixture
def sent(monkeypatch):
    """How many arrays were sent at a time, as if MLX computed on a GPU."""
    counts = []
    real = graph._send
    monkeypatch.setattr(graph, "device_target", lambda: "cuda")
    monkeypatch.setattr(graph, "_send", lambda *arrays: (counts.append(len(arrays)), real(*arrays)))
    return counts


def read(model, tokens):
    caches = model.make_caches()
    logits = model(tokens, caches, Rows.single(), logits="all").logits
    left = tree_flatten([cache.state for cache in caches])
    return [logits, *(array for _, array in left if isinstance(array, mx.array))]


def test_a_prompt_is_sent_piece_by_piece_and_keeps_its_bits(monkeypatch, sent):
    model, tokens = models().hybrid, prompt(20)
    layers = len(model.graph.layers)
    got = read(model, tokens)
    assert sent == [2] * (layers // graph.SENT_TOGETHER)
    monkeypatch.setattr(graph, "device_target", lambda: None)
    want = read(model, tokens)
    assert len(sent) == layers // graph.SENT_TOGETHER
    assert all(mx.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_decode_step_is_sent_whole(sent):
    model, tokens = models().hybrid, prompt(9)
    caches = model.make_caches()
    model(tokens[:, :8], caches, Rows.single())
    sent.clear()
    mx.eval(model(tokens[:, 8:], caches, Rows.single(8)).logits)
    assert not sent


def test_a_trace_of_a_chunk_sends_nothing_and_counts_all(monkeypatch, sent):
    model = models().hybrid
    while_sending = capture(model, context=0, length=16)
    monkeypatch.setattr(graph, "device_target", lambda: None)
    assert [op.name for op in while_sending.operations] == [
        op.name for op in capture(model, context=0, length=16).operations
    ]
