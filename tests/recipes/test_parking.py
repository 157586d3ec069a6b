"""The recipe for parks and pauses: what it measures under."""

from __future__ import annotations

import argparse

import mlx.core as mx

from labkit.engine.memory import MemoryGuard
from labkit.measure.parking import arrays_meter
from recipes.measured import parking
from tests.settled import settled_memory


def test_only_the_graph_that_runs_holds_weights():
    """mlx-lm's module beside it doubled what counted as used, and a ceiling close above it was never reached."""
    before = settled_memory()
    loaded = parking._model(argparse.Namespace(shape="qwen3.6-35b-a3b", graph="specialised", layers=4))
    mx.eval(mx.zeros(1))
    assert settled_memory() - before < 1.1 * loaded.weights_bytes
    guard = MemoryGuard(int((settled_memory() + 200_000_000) / 0.95), meter=arrays_meter())
    guard.begin(loaded.weights_bytes)
    assert guard.poll(force=True) == "normal", "so little above the weights, and somebody may still begin"
