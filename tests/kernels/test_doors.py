"""Every public operation, given what is no array, or an array of another kind: it says which argument it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass

import mlx.core as mx
import numpy as np
import pytest

from labkit.kernels import (
    attention,
    fused,
    gated_delta,
    grouped_matmul,
    persistent,
    quantized_matmul,
    routing,
    sampling,
)
from labkit.kernels.door import takes_arrays
from labkit.kernels.gated_delta.gates import layer_inputs
from labkit.kernels.gated_delta.gates import scan_inputs as rule_inputs
from labkit.kernels.persistent.gates import random_sparse
from labkit.kernels.quantized_matmul import Packed

MODULES = (attention, fused, gated_delta, grouped_matmul, persistent, quantized_matmul, routing, sampling)
HELPERS = ("_call", "choose_variant", "form_for", "groups_for", "row_spans", "tail_after", "_form")
"""Parts of operations, which take what the operations have checked."""


def public() -> dict[str, Callable]:
    """The operations that take arrays, by name."""
    found = {}
    for module in MODULES:
        for name in module.__all__:
            operation = getattr(module, name)
            takes = inspect.isfunction(operation) and "mx.array" in str(inspect.signature(operation))
            if takes and not name.endswith(HELPERS):
                found[f"{module.__name__.rpartition('.')[2]}.{name}"] = operation
    return found


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape)


def whole(*values: int) -> mx.array:
    return mx.array(values, dtype=mx.int32)


def packed(*shape: int) -> Packed:
    return Packed.quantize(normal(*shape), 32)


def mixer() -> dict:
    given = layer_inputs(1, 2, 1, 2, 32, 32, mx.float32)
    return {**given, "heads": (1, 2), "dims": (32, 32)}


def without(given: dict, *names: str) -> dict:
    return {name: value for name, value in given.items() if name not in names}


def heads_and_columns() -> dict:
    return {"queries": normal(1, 2, 1, 64), "keys": normal(1, 1, 8, 64), "values": normal(1, 1, 8, 64), "scale": 0.1}


def rule() -> dict:
    names = ("q", "k", "v", "log_decay", "beta", "state")
    return dict(zip(names, rule_inputs(1, 2, 1, 2, 32, 32, mx.float32), strict=True))


def experts() -> dict:
    return {"x": normal(2, 64), "gate": packed(4, 32, 64), "up": packed(4, 32, 64), "down": packed(4, 64, 32)}


def norms() -> dict:
    return {"q_weight": normal(64), "k_weight": normal(64), "positions": whole(3), "eps": 1e-6, "rotary": 16}


def layer() -> dict:
    return {"update": normal(1, 128), "stream": normal(1, 128), "sparse": random_sparse(mx.float32), "eps": 1e-6}


def delta_layer() -> dict:
    names = ("input_norm", "inputs", "conv", "a_log", "dt_bias", "norm", "output")
    arrays = (normal(128), packed(196, 128), normal(128, 4), normal(2), normal(2), normal(32), packed(128, 64))
    delta = persistent.Delta(**dict(zip(names, arrays, strict=True)), heads=(1, 2), dims=(32, 32))
    return {**layer(), "delta": delta, "tail": normal(1, 3, 128), "state": normal(1, 2, 32, 32)}


def attention_layer() -> dict:
    part = persistent.Attention(
        normal(128), packed(384, 128), normal(64), normal(64), packed(128, 128), (2, 1), 16, 1e7
    )
    columns = [normal(1, 1, size, 64) for size in (8, 8, 4, 4)]
    return {**layer(), "attention": part, "cached": persistent.Cached(*columns, *map(whole, (0, 9, 8, 1, 9)))}


VALID: dict[str, Callable[[], dict]] = {
    "attention.decode_attention": lambda: {**heads_and_columns(), "last": whole(5), "first": whole(1)},
    "attention.decode_rows": lambda: {
        **heads_and_columns(),
        "queries": normal(1, 2, 64),
        "first": whole(0),
        "last": whole(5),
    },
    "attention.paged_decode_attention": lambda: {
        **heads_and_columns(),
        "tail": attention.Tail(normal(1, 1, 4, 64), normal(1, 1, 4, 64), whole(8)),
        "table": whole(0)[None],
        "last": whole(9),
    },
    "attention.prefill_attention": lambda: {**heads_and_columns(), "start": whole(4), "first": whole(1)},
    "fused.append_heads": lambda: {
        "projected": normal(1, 1, 6 * 64),
        **norms(),
        "tail_keys": normal(1, 1, 4, 64),
        "tail_values": normal(1, 1, 4, 64),
        "write": whole(1),
    },
    "fused.embedding_rows": lambda: {"tokens": whole(3, 0), "weights": packed(32, 64), "dtype": mx.float32},
    "fused.gated_rms_norm": lambda: {"x": normal(2, 64), "z": normal(2, 64), "weight": normal(64), "eps": 1e-6},
    "fused.norm_project": lambda: {
        "x": normal(2, 64),
        "residual": normal(2, 64),
        "weight": normal(64),
        "eps": 1e-6,
        "weights": packed(32, 64),
    },
    "fused.norm_router": lambda: {
        "x": normal(1, 64),
        "residual": normal(1, 64),
        "weight": normal(64),
        "router": mx.quantize(normal(8, 64), 64, 8),
        "eps": 1e-6,
    },
    "fused.output_gate": lambda: {"attended": normal(1, 2, 3, 64), "q_gate": normal(1, 3, 2, 128)},
    "fused.place_columns": lambda: {
        "before": whole(9),
        "settled": whole(4),
        "batch": 2,
        "length": 1,
        "padding": whole(0, 3),
    },
    "fused.qk_norm_rope": lambda: {"queries": normal(1, 2, 2, 64), "keys": normal(1, 2, 1, 64), **norms()},
    "fused.residual_rms_norm": lambda: {"x": normal(64), "residual": normal(64), "weight": normal(64), "eps": 1e-6},
    "fused.swiglu": lambda: {"gate": normal(2, 64), "up": normal(2, 64)},
    "gated_delta.chunked": rule,
    "gated_delta.decode_step": lambda: {**mixer(), "eps": 1e-6},
    "gated_delta.gated_delta_update": rule,
    "gated_delta.gated_norm": lambda: {
        "y": normal(1, 2, 2, 32),
        "z": normal(1, 2, 2, 32),
        "weight": normal(32),
        "eps": 1e-6,
    },
    "gated_delta.scan": rule,
    "gated_delta.scan_blocked": rule,
    "gated_delta.scan_inputs": lambda: without(mixer(), "z", "state", "norm_weight"),
    "grouped_matmul.choose_decode_experts": lambda: {**experts(), "logits": normal(2, 4), "k": 2},
    "grouped_matmul.decode_experts": lambda: {
        **experts(),
        "indices": mx.array([[0, 1], [2, 0]], dtype=mx.int32),
        "weights": normal(2, 2),
    },
    "grouped_matmul.grouped_experts": lambda: {
        **experts(),
        "weights": normal(2, 2),
        "order": whole(0, 3, 1, 2),
        "block_map": routing.group_rows(mx.array([[0, 1], [2, 0]], dtype=mx.int32), 4, 16).block_map,
        "tile": 16,
    },
    "persistent.full_layer": attention_layer,
    "persistent.linear_layer": delta_layer,
    "persistent.sparse_half": layer,
    "quantized_matmul.quantized_matmul": lambda: {"x": normal(2, 64), "weights": packed(32, 64)},
    "routing.choose_experts": lambda: {"logits": normal(2, 8), "k": 2, "bias": normal(8)},
    "routing.group_rows": lambda: {
        "indices": mx.array([[0, 1], [2, 0]], dtype=mx.int32),
        "experts": 4,
        "tile": 16,
    },
    "routing.route": lambda: {"logits": normal(2, 8), "k": 2, "tile": 16},
    "sampling.argmax": lambda: {"logits": normal(2, 8)},
    "sampling.sample": lambda: {
        "logits": normal(2, 8),
        "temperature": 0.7,
        "seed": 1,
        "step": 0,
        "mask": mx.array([255, 255], dtype=mx.uint32)[:, None],
    },
}


def bits(result) -> list[bytes]:
    """Of all arrays of a result, in order."""
    if isinstance(result, mx.array):
        return [bytes(memoryview(result))]
    if is_dataclass(result):
        return bits([getattr(result, field.name) for field in fields(result)])
    return [part for each in result for part in bits(each)] if isinstance(result, (tuple, list)) else []


def test_no_operation_is_forgotten():
    assert sorted(VALID) == sorted(public())


def arrays_of(given: dict) -> dict:
    """The arguments that are arrays, or hold some."""
    return {
        name: value
        for name, value in given.items()
        if isinstance(value, (mx.array, Packed, tuple)) and name not in ("heads", "dims")
    }


@pytest.mark.parametrize("name", VALID)
def test_what_is_no_array_is_named(name):
    operation, given = public()[name], VALID[name]()
    call = lambda **changed: bits(operation(**{**given, **changed}, target="reference"))
    right, parameters = call(), inspect.signature(operation).parameters
    for argument, value in arrays_of(given).items():
        for wrong in (None, [1.0, 2.0], "text", 3.5):
            if wrong is None and str(parameters[argument].annotation).endswith("| None"):
                continue
            with pytest.raises(ValueError, match=rf"takes {argument} as .*, not {type(wrong).__name__}"):
                call(**{argument: wrong})
        if isinstance(value, mx.array):
            with pytest.raises(ValueError, match=rf"takes {argument} as mx.array.*mx\.array\(\.\.\.\) makes one"):
                call(**{argument: np.array(value)})
            with pytest.raises(ValueError, match=r"complex64"):
                call(**{argument: value.astype(mx.complex64)})
    assert right == call()


def test_what_python_says_itself_stays():
    """Neither a missing argument nor a fault of our own is told as the caller's."""

    @takes_arrays
    def faulty(x: mx.array) -> mx.array:
        return x.nothing

    with pytest.raises(TypeError, match="missing 1 required"):
        faulty()
    with pytest.raises(AttributeError, match="nothing"):
        faulty(mx.zeros(1))
    with pytest.raises(ValueError, match=r"faulty takes x as mx\.array, not list \[1\]; mx\.array\(...\) makes one"):
        faulty([1])
