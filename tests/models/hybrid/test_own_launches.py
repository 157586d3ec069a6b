"""With `decode_rows="own"` a decode step is labkit's launches and views of contiguous memory, and nothing else."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import pytest

from labkit.caches import PagedKV
from labkit.kernels import use_target
from labkit.kernels.registry import all_entries
from labkit.measure.trace.capture import Captured, Operation, record
from labkit.models import Rows
from labkit.models.hybrid import Hybrid, Variants, decode
from tests.models.hybrid.small import DENSE, TEXT, config, prompt, random_module

LAUNCHES = frozenset(entry.name for entry in all_entries())
VIEWS = ("Reshape", "Flatten", "Unflatten", "ExpandDims", "Squeeze", "Slice", "Split")


class Traced(Exception):
    """The step was traced: it could not be computed for a GPU that is not there."""


@cache
def model(kind: str, stream: str = "rounded") -> Hybrid:
    """A layer of each mixer, in bf16."""
    settings = config(DENSE if kind == "dense" else TEXT, num_hidden_layers=2)
    module = random_module(settings, seed=1)
    return Hybrid.from_module(module, settings, mx.bfloat16, variants=Variants(decode_rows="own", stream=stream))


def trace(hybrid: Hybrid, positions: list[int], length: int, logits: str, paged: bool, monkeypatch) -> Captured:
    """A step of `length` tokens behind so many of each row, as a GPU would get it."""
    form, traced, function = None, [], decode.FewTokens._function

    def traceable(few, *args, **options):
        compute = function(few, *args, **options)

        def call(arrays, spans, memory):
            cuts = [len(arrays), len(spans), *map(len, memory)]

            def flat(*parts):
                rest, pieces = list(parts), []
                for count in cuts:
                    pieces.append(rest[:count])
                    del rest[:count]
                asked, after = compute(pieces[0], pieces[1], [tuple(piece) for piece in pieces[2:]])
                return [part for part in asked if part is not None] + [array for part in after for array in part]

            flattened = [*arrays, *spans, *(array for part in memory for array in part)]
            traced.append(record(flat, *flattened, target="metal"))
            raise Traced

        return call

    monkeypatch.setattr(decode.FewTokens, "_function", traceable)
    if paged:
        form = PagedKV(hybrid.make_caches(), hybrid.layouts, pool_bytes=1 << 22, block_tokens=8, tail_tokens=16)
    rows = [form.make_caches(total=32)[0] if paged else hybrid.make_caches() for _ in positions]
    for caches, tokens in zip(rows, positions, strict=True):
        for held, layout in zip(caches, hybrid.layouts, strict=True):
            if held.kind == "contiguous":
                heads, width = layout.arrays[0].shape
                held.update_and_fetch(*[mx.zeros((1, heads, tokens, width), hybrid.dtype)] * 2)
            else:
                held.cache = [mx.zeros((1, *a.shape), getattr(mx, a.dtype)) for a in layout.arrays]
    alone = len(rows) == 1
    caches = rows[0] if alone else [type(layer[0]).merge(layer) for layer in zip(*rows, strict=True)]
    batch = Rows.single(positions[0]) if alone else Rows.batch(positions)
    with use_target("metal"), pytest.raises(Traced):
        hybrid(prompt(length, batch=len(positions)), caches, batch, logits=logits)
    return traced[0]


def foreign(captured: Captured) -> list[str]:
    """Operations that are neither a launch of labkit's nor a view that copies nothing."""
    return [o.name for o in captured.operations if o.name not in LAUNCHES and not is_view(o)]


def is_view(operation: Operation) -> bool:
    """Whether it only looks at memory that lies in one piece; what is cut behind an axis of several is none."""
    if operation.name not in VIEWS:
        return False
    if operation.name not in ("Slice", "Split"):
        return True
    (whole,) = operation.inputs
    for part in operation.outputs:
        cut = next((i for i, (a, b) in enumerate(zip(whole.shape, part.shape, strict=True)) if a != b), 0)
        if any(size != 1 for size in whole.shape[:cut]):
            return False
    return True


STEPS = {
    "one row": ("sparse", [5], 1, "last", False),
    "four padded rows": ("sparse", [5, 3, 7, 5], 1, "last", False),
    "four padded rows in pages": ("sparse", [5, 3, 7, 5], 1, "last", True),
    "twelve padded rows": ("sparse", [5, 6, 7] * 4, 1, "last", False),
    "three rows to verify": ("sparse", [5, 3, 5], 2, "all", False),
    "one row's last of four": ("sparse", [5], 4, "last", False),
    "dense, two rows": ("dense", [5, 3], 1, "last", False),
    "dense, ten rows": ("dense", [5, 3] * 5, 1, "last", False),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_step_is_our_launches_and_views(step, monkeypatch):
    kind, *form = STEPS[step]
    captured = trace(model(kind), *form, monkeypatch)
    assert not foreign(captured)
    assert sum(operation.name in LAUNCHES for operation in captured.operations) > 10


@pytest.mark.parametrize("step", ["one row", "twelve padded rows"])
def test_a_stream_in_float32_adds_no_launch(step, monkeypatch):
    kind, *form = STEPS[step]
    traces = []
    for stream in ("float32", "rounded"):
        with monkeypatch.context() as patched:
            traces.append(trace(model(kind, stream), *form, patched))
    wide, narrow = traces
    assert not foreign(wide)
    assert [operation.name for operation in wide.operations] == [operation.name for operation in narrow.operations]


@pytest.mark.parametrize("planted", ["Exp", "QuantizedMatmul", "rms_norm"])
def test_an_operation_of_mlx_is_found(planted, monkeypatch):
    hybrid = model("sparse")
    embed = hybrid.graph.embed
    if planted == "Exp":
        monkeypatch.setattr(hybrid.graph, "embed", lambda tokens: mx.exp(embed(tokens)))
    elif planted == "rms_norm":
        monkeypatch.setattr(hybrid.graph, "embed", lambda tokens: mx.fast.rms_norm(embed(tokens), None, 1e-6))
    else:
        monkeypatch.setattr(hybrid, "variants", Variants())
    assert set(foreign(trace(hybrid, [5], 1, "last", False, monkeypatch))) == {planted}


@pytest.mark.parametrize(
    ("shape", "cut", "found"),
    [
        ((1, 3, 4), lambda x: x[:, -1:], []),
        ((2, 3, 4), lambda x: x[1:], []),
        ((2, 3, 4), lambda x: x[:, -1:], ["Slice"]),
        ((2, 3, 4), lambda x: mx.split(x, 2, axis=2)[0], ["Split"]),
        ((2, 3, 4), lambda x: x.swapaxes(0, 1), ["Transpose"]),
    ],
)
def test_a_view_that_a_launch_would_copy_is_found(shape, cut, found):
    assert foreign(record(cut, mx.zeros(shape))) == found
