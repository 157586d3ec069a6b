"""A prompt's layers, sent to a GPU while the host builds the next ones: the same bits, and nothing under a trace."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from labkit.measure.trace import capture
from labkit.models import Rows
from labkit.models.hybrid import Hybrid, graph, sending
from tests.models.hybrid.small import models, prompt


class Device:
    """A GPU that finishes a layer only when it is waited for; what MLX is told goes on to MLX."""

    def __init__(self):
        self.unfinished, self.most, self.sent = [], 0, 0

    def async_eval(self, *arrays):
        mx.async_eval(*arrays)
        self.sent += 1
        self.unfinished.append(arrays)
        self.most = max(self.most, len(self.unfinished))

    def eval(self, *arrays):
        """What was sent before is finished too: a GPU works in order."""
        mx.eval(*arrays)
        place = next(i for i, sent in enumerate(self.unfinished) if any(a is b for a in arrays for b in sent))
        del self.unfinished[: place + 1]


@pytest.fixture
def device(monkeypatch):
    """As if MLX computed on a GPU."""
    device = Device()
    monkeypatch.setattr(graph, "device_target", lambda: "cuda")
    monkeypatch.setattr(sending, "mx", device)
    return device


def read(model, tokens):
    caches = model.make_caches()
    logits = model(tokens, caches, Rows.single(), logits="all").logits
    left = tree_flatten([cache.state for cache in caches])
    return [logits, *(array for _, array in left if isinstance(array, mx.array))]


def test_a_prompt_is_sent_layer_by_layer_and_keeps_its_bits(monkeypatch, device):
    model, tokens = models().hybrid, prompt(20)
    got = read(model, tokens)
    # All but the last, whose MLP a prompt without logits does not need.
    assert device.sent == len(model.graph.layers) - 1
    monkeypatch.setattr(graph, "device_target", lambda: None)
    want = read(model, tokens)
    assert device.sent == len(model.graph.layers) - 1
    assert all(mx.array_equal(a, b) for a, b in zip(got, want, strict=True))


def test_the_host_waits_before_it_is_too_many_layers_ahead(monkeypatch, device):
    model = models().hybrid
    monkeypatch.setattr(model.graph, "layers", model.graph.layers * 5)
    monkeypatch.setattr(Hybrid, "_check", lambda *_: None)
    caches = [cache for _ in range(5) for cache in model.make_caches()]
    model(prompt(20), caches, Rows.single(), logits=None)
    assert device.sent == len(caches) - 1
    assert device.most == sending.IN_FLIGHT
    # One is computed and at least one waits, so that the GPU goes on while the host builds.
    assert len(device.unfinished) == sending.IN_FLIGHT >= 2


def test_a_decode_step_is_sent_whole(device):
    model, tokens = models().hybrid, prompt(9)
    caches = model.make_caches()
    model(tokens[:, :8], caches, Rows.single())
    mx.eval(model(tokens[:, 8:], caches, Rows.single(8)).logits)
    assert device.sent == 0


def test_a_trace_of_a_chunk_sends_nothing_and_counts_all(monkeypatch, device):
    model = models().hybrid
    while_sending = capture(model, context=0, length=16)
    assert device.sent == 0
    monkeypatch.setattr(graph, "device_target", lambda: None)
    assert [op.name for op in while_sending.operations] == [
        op.name for op in capture(model, context=0, length=16).operations
    ]
