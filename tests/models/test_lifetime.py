"""A model goes with the last reference to it, weights and all, without a garbage collection."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref

import mlx.core as mx
import pytest

from labkit.kernels.targets import use_target
from labkit.models import Rows
from labkit.models.adapter import Adapter
from labkit.models.hybrid import Hybrid
from labkit.models.hybrid.native import NativeHybrid
from tests.models.hybrid.small import config, random_module

SCALARS = 256  # bytes: now and then MLX itself keeps a number or two
GRAPHS = {"adapter": Adapter, "specialised": Hybrid.from_module, "native": NativeHybrid.from_module}


@pytest.fixture(autouse=True)
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_last_reference_takes_the_weights_with_it(graph):
    """With compiled decode steps, where a graph has some."""
    if graph == "native" and mx.default_device() != mx.cpu:
        pytest.skip("a CPU's graph")
    module = random_module(config())
    mx.eval(module.parameters())
    before = mx.get_active_memory()
    model = GRAPHS[graph](module, config())
    caches = model.make_caches()
    with use_target("reference") if graph == "specialised" else contextlib.nullcontext():
        model(mx.ones((1, 9), mx.int32), caches, Rows.single())
        for position in (9, 10):  # the second time, a graph that was compiled is replayed
            mx.eval(model(mx.ones((1, 1), mx.int32), caches, Rows.single(position)).logits)
    kept = weakref.ref(model)
    del model, caches
    assert kept() is None
    wait_until(lambda: mx.get_active_memory() <= before + SCALARS)


def wait_until(settled) -> None:
    """MLX's thread lets go of what it has computed in its own time."""
    end = time.monotonic() + 30
    while not settled():
        assert time.monotonic() < end
        time.sleep(0.01)
