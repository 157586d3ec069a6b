"""The products of a decode step in all their forms, as they run in it: one CUDA graph over the weights of all layers.

    python -m recipes.measured.step_forms --out data/measured --commit SHA --rows 1 8 --seconds 100

`labkit kernels bench` times launches of one kernel by themselves, and the host's part with them. Here each form is
recorded (`labkit.kernels.recording`) for every layer of the full shape, one after the other, each with its own weights,
and the graph is replayed: no host's part, nothing left in a cache from the layer before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from labkit.kernels.fused.projection import NORM_PROJECT, norm_project_call
from labkit.kernels.fused.residual import residual_rms_norm
from labkit.kernels.grouped_matmul.launches import CHOOSE_GATE_UP, DECODE_DOWN, choose_gate_up_call, decode_down_call
from labkit.kernels.quantized_matmul.launches import FEW_ROWS, few_rows_call
from labkit.kernels.recording import count_on, machine_here, record
from recipes.measured.table import Table

SHAPE = "qwen3.6-35b-a3b"
ROUNDS, REPLAYS = 5, 10
DEFAULT = (None, None)
SPLITS = {
    "out": [DEFAULT, (16, 2), (16, 1), (8, 4), (8, 2), (8, 1), (4, 8), (4, 4)],
    "inputs": [DEFAULT, (16, 1), (8, 2), (4, 4)],
    "norm and inputs": [DEFAULT, (16, 1), (8, 2), (4, 4)],
    "gate, up plain": [DEFAULT, (2, None), (4, None), (8, None)],
    "gate, up tensor": [DEFAULT, (2, 4), (4, 2), (8, 2), (16, 1)],
    "down plain": [DEFAULT, (2, None), (4, None), (8, None)],
    "down tensor": [DEFAULT, (5, 4), (9, 2), (18, 2), (18, 1)],
}
"""Simdgroups of a threadgroup and steps that each has in flight, by product; `DEFAULT` is what labkit chooses."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, to try the script")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--only", nargs="*", choices=list(SPLITS), default=list(SPLITS))
    parser.add_argument("--seconds", type=float, default=100.0)
    arguments = parser.parse_args()

    from labkit.measure.end_to_end.subject import open_subject

    path, about = arguments.out / "h200_step_forms.json", {"shape": SHAPE, "layers": arguments.layers}
    table = Table(path, arguments.commit, seconds=arguments.seconds, **about)
    layers = open_subject(SHAPE, graph="specialised", layers=arguments.layers).model.graph.layers
    for count in arguments.rows:
        problem = Problem(layers, count)
        for product in arguments.only:
            for simds, unroll in SPLITS[product]:
                if table.left < 0:
                    continue
                row = {"rows": count, "product": product, "simds": simds, "unroll": unroll}
                try:
                    row["us"] = microseconds(problem.calls(product, simds, unroll))
                except (ValueError, RuntimeError) as error:  # a form that these rows cannot have
                    row["failed"] = str(error)[:200]
                table.add(row)
                table.say(str(row))


class Problem:
    """Some rows in front of every layer's weights, its experts drawn anew for each layer."""

    def __init__(self, layers: Any, rows: int):
        self.layers = layers
        weights = layers[0].mlp.weights
        self.shared = weights.shared_slots
        self.experts = weights.gate.experts - self.shared
        slots, hidden = 8 + self.shared, layers[0].mixer.weights.inputs.k
        normal = lambda *shape: mx.random.normal(shape).astype(mx.bfloat16)
        self.x, self.mixed = normal(rows, hidden), normal(rows, layers[0].mixer.weights.output.k)
        self.hidden, self.weights = normal(rows * slots, weights.down.k), mx.random.uniform(shape=(rows, slots))
        self.logits = [mx.random.normal((rows, self.experts + self.shared)) for _ in layers]
        self.chosen = [mx.argsort(-logits, axis=-1)[:, :slots].astype(mx.int32) for logits in self.logits]
        mx.eval(self.x, self.mixed, self.hidden, self.weights, self.logits, self.chosen)

    def calls(self, product: str, simds: int | None, unroll: int | None) -> Iterator[Callable[[], Any]]:
        """A call for each layer."""
        split = {"simds": simds, "unroll": unroll}
        form, few = product.split()[-1], "row" if len(self.x) == 1 else "tensor"
        for layer, logits, chosen in zip(self.layers, self.logits, self.chosen, strict=True):
            inputs, experts = layer.mixer.weights.inputs.packed, layer.mlp.weights
            if product == "out":
                call = few_rows_call(self.mixed, layer.mixer.weights.output.packed, few, **split)
                yield lambda call=call: FEW_ROWS[few](**call)
            elif product == "inputs":
                call = few_rows_call(self.x, inputs, few, **split)
                norm = lambda layer=layer: residual_rms_norm(self.x, self.x, layer.input_norm, 1e-6)[1]
                yield lambda call=call, n=norm: FEW_ROWS[few](**call | {"inputs": [n(), *call["inputs"][1:]]})
            elif product == "norm and inputs":
                call = norm_project_call(self.x, self.x, layer.input_norm, 1e-6, inputs, few, **split)
                yield lambda call=call: NORM_PROJECT[few](**call)
            elif product.startswith("gate"):
                choice = {"experts": self.experts, "shared": self.shared}
                call = choose_gate_up_call(self.x, experts.gate, experts.up, logits, 8, form, **choice, **split)
                yield lambda call=call: CHOOSE_GATE_UP[form](**call)
            else:
                call = decode_down_call(self.hidden, experts.down, chosen, self.weights, form=form, **split)
                yield lambda call=call: DECODE_DOWN[form](**call)


def microseconds(calls: Iterator[Callable[[], Any]]) -> float:
    """Of one call, in a graph of all of them; the least of some rounds."""
    calls, machine = list(calls), machine_here()
    if machine is None:
        raise RuntimeError("recordings cannot be replayed here: an NVIDIA GPU and cuda-bindings are needed")
    counter, by = mx.zeros((32,), mx.int32), mx.ones((32,), mx.int32)
    mx.eval(counter, by)

    def step(carried: list[mx.array], _: list[mx.array]) -> list[mx.array]:
        for call in calls:
            call()
        return [count_on(carried[0], by)]

    recording, best = record(step, [counter], [], machine, reads=[0]), []
    recording.open([counter], [])
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(REPLAYS):
            begun = recording.replay()
        recording.read(begun)
        best.append((time.perf_counter() - begin) / REPLAYS / len(calls))
    return 1e6 * min(best)


if __name__ == "__main__":
    main()
