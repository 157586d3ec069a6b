"""The mechanisms of the specialised graph, each with the control that takes it away and what that should cost by count.

The prediction is made before the run, in seconds: bytes that the control moves beyond the engine, at the rate of this
device; or operations; or waits. It says nothing of what caches catch and of what runs meanwhile, so a measured cost
below it is expected, and one above it names something that was not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from labkit.measure.end_to_end.plan import Point
from labkit.measure.floors import Floors
from labkit.measure.model_costs import ModelCosts
from labkit.measure.model_tensors import DTYPE_BYTES
from labkit.measure.paired import time_call


@dataclass(frozen=True)
class Machine:
    """What predictions need of a device: its floors, seconds of a wait by the host, seconds of one more launch."""

    floors: Floors
    wait: float
    launch: float

    @classmethod
    def measured(cls, floors: Floors, *, rounds: int = 15) -> Machine:
        """A wait: one small operation evaluated alone. A launch: what each of a chain of such operations adds."""
        x = mx.ones((1024,))

        def chain(length: int) -> float:
            def run() -> mx.array:
                y = x
                for _ in range(length):
                    y = mx.sin(y)
                return y

            return min(time_call(run) for _ in range(rounds))

        chain(64)
        short, long = chain(1), chain(257)
        return cls(floors, short, max(0.0, (long - short) / 256))


Extra = Callable[[ModelCosts, Machine, int], float | None]
"""(costs, machine, tokens) -> seconds that the control should take beyond the engine; None where no count says it."""


@dataclass(frozen=True)
class Ablation:
    """One mechanism, its control and where it should tell.

    Attributes:
        name: of the mechanism. control: the switches that take it away. saves: what it saves, in words.
        points: where it is measured. extra: the prediction.
        published: by point's name, the figure of "specialised-engine" beside it.
        base: switches of the side that has the mechanism, where they are not the engine's defaults.
    """

    name: str
    control: dict[str, Any]
    saves: str
    points: tuple[Point, ...]
    extra: Extra
    published: dict[str, str] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)


def _bytes(count: Callable[[ModelCosts, int], float]) -> Extra:
    return lambda costs, machine, tokens: count(costs, tokens) / machine.floors.read.value


def _launches(a_layer: float, kind: str) -> Extra:
    """So many more launches in each layer of a kind: "attention", "deltanet" or "all"."""

    def extra(costs: ModelCosts, machine: Machine, tokens: int) -> float:
        full = sum(costs.layers_full)
        layers = {"attention": full, "deltanet": len(costs.layers_full) - full, "all": len(costs.layers_full)}[kind]
        return a_layer * layers * machine.launch

    return extra


def _text(costs: ModelCosts) -> dict[str, Any]:
    return costs.config.get("text_config", costs.config)


def _dense_floats(costs: ModelCosts, tokens: int) -> float:
    """Bytes of the matrices outside the experts, written as floats and read back."""
    parts = ("experts", "embedding", "head")
    weights = sum(t.parameters for t in costs.tensors if t.is_matrix and t.quantisation and t.part not in parts)
    return 2 * DTYPE_BYTES[costs.dtype] * weights


def _expert_floats(costs: ModelCosts, tokens: int) -> float:
    """Bytes of every expert's matrices, chosen or not, written as floats, and of the chosen ones read back."""
    weights = sum(t.parameters for t in costs.tensors if t.part == "experts" and t.quantisation)
    count = _text(costs).get("num_experts", 1)
    return DTYPE_BYTES[costs.dtype] * weights * (1 + costs.experts_touched(tokens) / count)


def _gathered(costs: ModelCosts, tokens: int) -> float:
    """Bytes of experts when every token reads its own, beyond one read of those that are touched."""
    stored = sum(tensor.bytes(costs.dtype) for tensor in costs.tensors if tensor.part == "experts")
    count, chosen = _text(costs).get("num_experts", 1), _text(costs).get("num_experts_per_tok", 1)
    return stored * (tokens * chosen - costs.experts_touched(tokens)) / count


def _blocked_state(costs: ModelCosts, tokens: int) -> float:
    """Bytes of recurrent state read and written once in 32 tokens instead of once."""
    text, layers = _text(costs), len(costs.layers_full) - sum(costs.layers_full)
    matrix = 4 * text["linear_num_value_heads"] * text["linear_key_head_dim"] * text["linear_value_head_dim"]
    return layers * matrix * 2 * (tokens // 32 - 1)


def _waits(costs: ModelCosts, machine: Machine, tokens: int) -> float:
    """The host waits for the device once in every layer with experts."""
    return machine.wait * len({tensor.layer for tensor in costs.tensors if tensor.part == "experts"})


def _unpacked(costs: ModelCosts, tokens: int) -> float:
    """Keys and values read by each query head, beyond once for the heads that share them."""
    text = _text(costs)
    return costs.kv_bytes(tokens) * (text["num_attention_heads"] // text["num_key_value_heads"] - 1)


def _decode(*contexts: int) -> tuple[Point, ...]:
    return tuple(Point("decode", context) for context in contexts)


def _prefill(*lengths: int) -> tuple[Point, ...]:
    return tuple(Point("prefill", length) for length in lengths)


_FIXED = "decode gain of the fixed-block layout, "

UNKNOWN: Extra = lambda costs, machine, tokens: None
NOTHING: Extra = lambda costs, machine, tokens: 0.0

ABLATIONS: tuple[Ablation, ...] = (
    Ablation(
        "routing stays on the device", {"routing": "host"}, "a wait of the host in every layer",
        _prefill(512, 4096), _waits, {"prefill-512": "prefill gain of routing on the GPU, 512 tokens"},
    ),
    Ablation(
        "dequantise inside dense products", {"dequantise": "before"}, "floats of weights written and read back",
        _prefill(512, 4096), _bytes(_dense_floats), base={"dequantise": "in_tile"},
    ),
    Ablation(
        "dequantise inside the grouped product", {"experts": "before"}, "floats of all experts written and read back",
        _prefill(512, 4096), _bytes(_expert_floats),
        {"prefill-512": "prefill gain of dequantising inside the grouped GEMM, 512 tokens"},
    ),
    Ablation(
        "tiles as high as the load", {"experts": "tile16"}, "weights unpacked once for more rows",
        _prefill(2048), UNKNOWN, {"prefill-2048": "prefill gain of 32-row expert tiles over 16-row ones, 2K"},
    ),
    Ablation(
        "rows sorted by expert", {"experts": "gather"}, "each expert's weights read once a token",
        _prefill(512), _bytes(_gathered),
    ),
    Ablation(
        "recurrent state in registers", {"delta": "blocked"}, "state written and read every 32 tokens",
        _prefill(2048), _bytes(_blocked_state), {"prefill-2048": "prefill gain of the register-resident scan, 2K"},
        base={"delta": "scan"},
    ),
    Ablation(
        "recurrence in chunks of products", {"delta": "scan"}, "tokens one after the other",
        _prefill(2048, 32768), UNKNOWN, base={"delta": "chunked"},
    ),
    Ablation(
        "query heads share a read", {"heads": "unpacked"}, "keys and values read by each query head",
        _decode(4096, 32768, 131072), _bytes(_unpacked),
        {"decode-32768": "decode gain of four query heads a KV read, 32K"},
    ),
    Ablation(
        "fixed blocks from 32K on", {"columns": "general"}, "nothing countable", _decode(32768, 65536, 131072), NOTHING,
        {f"decode-{n}": _FIXED + name for n, name in ((32768, "32K"), (65536, "64K"), (131072, "128K"))},
        base={"columns": "by_context"},
    ),
    Ablation(
        "wide reads of keys and values", {"loads": "single"}, "requests, not bytes", _decode(3840, 32768), NOTHING,
        {"decode-3840": "decode gain of coalesced KV reads, 3,840 tokens"},
    ),
    Ablation(
        "new columns go to a small tail", {"kv": "whole"}, "a copy of all keys and values, on CUDA",
        _decode(4096, 32768, 131072), _bytes(lambda costs, tokens: 2 * costs.kv_bytes(tokens)),
    ),
    Ablation(
        "the step is built once", {"compiled": False}, "building the graph for each token", _decode(4096), UNKNOWN
    ),
    Ablation(
        "gate, up and activation in one launch", {"fuse_experts": False}, "two launches a layer",
        _decode(4096), _launches(2, "all"),
    ),
    Ablation(
        "down, weights and shared expert in one launch", {"fuse_combine": False}, "two launches a layer",
        _decode(4096), _launches(2, "all"),
    ),
    Ablation(
        "experts chosen in the launch of their gate and up", {"fuse_choice": False}, "a launch a layer",
        _decode(4096), _launches(1, "all"),
    ),
    Ablation(
        "residual and norm in the launch of the projections", {"fuse_norm": False}, "a launch a layer, but the first",
        _decode(4096), _launches(1, "all"),
    ),
    Ablation(
        "norms, rotation and the new column in one launch", {"fuse_queries": False}, "five launches an attention layer",
        _decode(4096), _launches(5, "attention"),
    ),
    Ablation(
        "convolution, recurrence and norm in one launch", {"fuse_recurrence": False}, "two launches a DeltaNet layer",
        _decode(4096), _launches(2, "deltanet"),
    ),
    Ablation(
        "MLX's product for small matrices", {"decode_rows": "own"}, "nothing countable", _decode(4096), NOTHING
    ),
    Ablation("rows as vectors", {"decode_rows": "tile"}, "tiles with one row in use", _decode(4096), UNKNOWN),
)  # fmt: skip
