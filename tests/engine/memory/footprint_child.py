"""What forwards of the native graph take of a process, page by page: `python footprint_child.py CASES`, JSON both ways.

In a process of its own, because only there nobody else's memory comes and goes. Its arrays are mapped one by one, so
that a new one never lies where an old one was.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import sys

import mlx.core as mx

import labkit
from labkit.engine.capacity import Budget
from labkit.engine.memory import Estimates
from labkit.measure.footprint import raised
from labkit.models import LoadedModel, Rows
from labkit.models.hybrid.native import NativeHybrid
from tests.models.hybrid.small import DENSE, config, random_module
from tests.settled import settled_memory

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "32768", "NUMPY_MADVISE_HUGEPAGE": "0"}


def opened(kind: str, threads: int) -> LoadedModel:
    """tiny-hybrid, or a dense model that is wide enough for pages not to count."""
    loaded = labkit.load("tiny-hybrid", graph="native")
    if kind == "dense":
        settings = config(DENSE, hidden_size=256, intermediate_size=1024, num_attention_heads=8, head_dim=128)
        model = NativeHybrid.from_module(random_module(settings), settings, threads=threads)
        return dataclasses.replace(loaded, model=model, config=settings, weights_bytes=model.weights_bytes)
    loaded.model._workers.threads = threads
    return loaded


def filled(model: NativeHybrid, rows: int, context: int) -> list:
    """Caches as `context` tokens of each row leave them."""
    caches = [model.make_caches() for _ in range(rows)]
    for cache in (cache for row in caches for cache in row if context):
        shapes = [spec.shape for spec in cache.layout.arrays]
        if cache.kind == "recurrent":
            cache[0], cache[1] = (mx.zeros((1, *shape)) + 1 for shape in shapes)
        else:
            cache.update_and_fetch(*(mx.zeros((1, heads, context, width)) for heads, width in shapes))
    if rows == 1:
        return caches[0]
    return [type(layer[0]).merge(list(layer)) for layer in zip(*caches, strict=True)]


def give_back() -> None:
    """What was freed and is still the process's, such as what loading compiled code took: a forward would find it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def footprint(model: NativeHybrid, rows: int, chunk: int, context: int) -> int:
    """Bytes by which one forward raised the process at most, its logits and what its caches grew by included."""
    caches = filled(model, rows, context)
    tokens, where = mx.zeros((rows, chunk), mx.int32), Rows.batch([context] * rows)
    where = Rows.single(context) if rows == 1 else where
    mx.eval(tokens, where.positions, [cache.state for cache in caches])
    gc.collect()
    settled_memory()
    mx.clear_cache()
    give_back()
    return raised(lambda: mx.eval(model(tokens, caches, where).logits, [cache.state for cache in caches]))


def main() -> None:
    mx.set_cache_limit(0)
    results = []
    for kind, threads, cases in json.loads(sys.argv[1]):
        loaded = opened(kind, threads)
        known = Estimates(loaded, Budget(loaded))
        footprint(loaded.model, 2, 40, 0)  # compiled, and all that stays is there
        for rows, chunk, context in cases:
            before = known.caches(context, 0, chunk=1) if context else 0
            grown = known.caches(context, chunk, chunk=chunk) - before
            said = rows * grown + known.transient(chunk, context, rows=rows)
            measured = footprint(loaded.model, rows, chunk, context)
            results.append([kind, threads, rows, chunk, context, said, measured])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
