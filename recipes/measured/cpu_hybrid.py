"""The native hybrid and the native kernels on this CPU against mlx-lm, MLX's operations and transformers' torch.

    python -m recipes.measured.cpu_hybrid --out data/measured/cpu_hybrid.json --commit $(git rev-parse --short HEAD)

`--torch PYTHON` names a Python with torch and transformers, which runs in a process of its own. Sides that share this
process take turns; the least of their rounds counts, and the median ratio is beside it. Each prediction follows from
operations and bytes at the rates measured first (`rates`), by the shares written at `EXPECTED`. The file is written
after every part.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import labkit
from labkit.devices import installed_versions
from labkit.kernels.gated_delta import gates as delta_gates
from labkit.kernels.gated_delta import scan
from labkit.kernels.quantized_matmul import Packed, quantized_matmul
from labkit.kernels.workers import all_workers
from labkit.measure.model_costs import ModelCosts
from labkit.measure.paired import paired
from labkit.models import Model, Rows
from labkit.models.adapter import Adapter
from recipes.measured.table import Table, shown

MODEL = "tiny-hybrid"
PROMPTS, CONTEXTS, BATCHES = (64, 512, 2048), (256, 2048), (1, 4, 8)
PARTS = ("kernels", "decode", "prefill", "torch")

EXPECTED = {"product": 0.6, "one row": 0.35, "scan": 0.35, "model": 0.45, "step": 0.25}
"""Shares of the multipliers' rate, guessed before any run: tiles with dequantisation inside; one row, whose every
weight is unpacked for one use; the scan, four operations on the two multipliers for three that count; a model's
prompt, with its exponentials and norms; a step, with Python between its loops."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--torch", help="a Python with torch and transformers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    arguments = parser.parse_args()
    about = installed_versions(("numba", "numpy")) | {
        "threads": all_workers().threads,
        "load_before": os.getloadavg()[0],
    }
    table = Table(arguments.out, arguments.commit, **about, rates=rates(), expected=EXPECTED)
    table.say(str(table.about))

    def measure(part: str) -> None:
        for row in globals()[part](table.about["rates"], arguments):
            table.add({"part": part, **row})
            table.say(f"{part}: {shown(row)}")

    for part in arguments.parts:
        table.attempt(part, partial(measure, part))


def rates() -> dict[str, float]:
    """This machine's multipliers, one thread, and its memory: GFLOP/s and GB/s, the best of several."""
    from recipes.measured.cpu_rates import multiply_add_rate

    source = np.ones(1 << 25, np.float32)
    read = min(timed(lambda: source.max()) for _ in range(7))
    return {"gflops_one_thread": multiply_add_rate() / 1e9, "read_gb_s": source.nbytes / read / 1e9}


# -- kernels -----------------------------------------------------------------------------------------------------------


def kernels(rates: dict[str, float], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of the kernel laboratory's CPU line: ours on the native target, MLX's fp32 operations beside."""
    rows = [_product(1, 2048, rates, arguments), _product(1, 12288, rates, arguments)]
    rows += [_product(8, 2048, rates, arguments), _product(512, 2048, rates, arguments)]
    rows += [_scan(2048, 8, 8, 64, rates, arguments), _scan(512, 16, 32, 128, rates, arguments)]
    return rows


def _product(m: int, n: int, rates: dict[str, float], arguments: argparse.Namespace) -> dict[str, Any]:
    mx.random.seed(0)
    k = 2048
    weights, x = Packed.quantize(mx.random.normal((n, k))), mx.random.normal((m, k))
    mx.eval(x, weights.arrays)
    theirs = partial(mx.quantized_matmul, x, *weights.arrays, transpose=True, group_size=64, bits=4)
    ours = partial(quantized_matmul, x, weights, target="native")
    share = EXPECTED["one row" if m == 1 else "product"]
    return _row(
        f"4-bit product, {m} x {k} by {n}", theirs, ours, 2 * m * n * k, weights.nbytes, share, rates, arguments
    )


def _scan(length: int, hk: int, hv: int, dim: int, rates: dict[str, float], arguments: argparse.Namespace) -> dict:
    mx.random.seed(0)
    q, k, v, log_decay, beta, state = delta_gates.scan_inputs(1, length, hk, hv, dim, dim, mx.float32)
    decay = mx.exp(log_decay)
    mx.eval(q, k, v, log_decay, beta, state, decay)
    theirs = partial(mx.fast.gated_delta_update, q, k, v, decay, beta, state)
    ours = partial(scan, q, k, v, log_decay, beta, state, target="native")
    operations = 7 * length * hv * dim * dim
    moved = sum(array.nbytes for array in (q, k, v, v, state, state))
    what = f"scan, {length} tokens, {hk} and {hv} heads of {dim}"
    return _row(what, theirs, ours, operations, moved, EXPECTED["scan"], rates, arguments)


def _row(
    what: str,
    theirs: Callable,
    ours: Callable,
    operations: float,
    moved: float,
    share: float,
    rates: dict[str, float],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    predicted = max(operations / (share * rates["gflops_one_thread"] * 1e9), moved / (rates["read_gb_s"] * 1e9))
    runs = paired(theirs, ours, rounds=arguments.rounds)
    least, best = min(runs.first), min(runs.second)
    return {
        "what": what,
        "predicted_ms_one_thread": 1e3 * predicted,
        "measured_ms": 1e3 * best,
        "gflops": operations / best / 1e9,
        "mlx_ms": 1e3 * least,
        "times_faster": least / best,
        "median_ratio": runs.ratio,
        "ratio_interval": [runs.ratio_low, runs.ratio_high],
    }


# -- the model ---------------------------------------------------------------------------------------------------------


def models() -> dict[str, Model]:
    """labkit's native graph, and mlx-lm's in the forms that a user of a CPU may choose."""
    packed = labkit.load(MODEL, graph="adapter")
    floats = labkit.load(MODEL, graph="adapter").model.module
    _unpack(floats)
    sides = {
        "native": labkit.load(MODEL, graph="native").model,
        "mlx-lm, 4 bits, float32": packed.model,
        "mlx-lm, float32": Adapter(floats, packed.config),
    }
    return {**sides, "mlx-lm, 4 bits, bfloat16": labkit.load(MODEL, graph="adapter", dtype=mx.bfloat16).model}


def _unpack(module: Any) -> None:
    """Plain layers in place of quantised ones: what MLX's fastest products on a CPU take."""
    import mlx.nn as nn
    from mlx.utils import tree_map_with_path
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    def plain(path: str, layer: Any) -> Any:
        if not isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedSwitchLinear)):
            return layer
        weight = mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits)
        rows, columns = weight.shape[-2:]
        if isinstance(layer, QuantizedSwitchLinear):
            made = SwitchLinear(columns, rows, weight.shape[0], bias=False)
        else:
            made = nn.Embedding(1, 1) if isinstance(layer, nn.QuantizedEmbedding) else nn.Linear(1, 1, bias=False)
        made.weight = weight
        return made

    module.update_modules(tree_map_with_path(plain, module.leaf_modules(), is_leaf=nn.Module.is_module))
    mx.eval(module.parameters())


def prefill(rates: dict[str, float], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens a second of a prompt, from empty caches to the last logits."""
    sides, costs = models(), ModelCosts(labkit.load(MODEL, graph="adapter").config)
    ours, rows, fastest = sides.pop("native"), [], set(sides)
    for length in PROMPTS:
        tokens = mx.array(np.random.RandomState(0).randint(0, 8000, (1, length)).astype(np.int32))
        speed = rates["gflops_one_thread"] * 1e9 * all_workers().threads
        operations = costs.prefill_operations(length)
        run = lambda model, tokens=tokens: model(tokens, model.make_caches(), Rows.single()).logits
        for name, model in sides.items():
            if length > min(PROMPTS) and name not in fastest:
                continue  # slower than the others already at the shortest
            long = length > 512 or "bfloat16" in name
            rounds, warm_up = (3, 0) if long else (arguments.rounds, 1)
            runs = paired(partial(run, model), partial(run, ours), rounds=rounds, warm_up=warm_up)
            rows.append(
                {
                    "tokens": length,
                    "beside": name,
                    "floor_tok_s": length * speed / operations,
                    "predicted_tok_s": EXPECTED["model"] * length * speed / operations,
                    **_speeds(runs, length),
                }
            )
        # The two best of each length meet the next one.
        here = sorted((row for row in rows if row["tokens"] == length), key=lambda row: -row["beside_tok_s"])
        fastest = {row["beside"] for row in here[: 2 if length == min(PROMPTS) else 1]}
    return rows


def decode(rates: dict[str, float], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens a second of steps; each side feeds its own caches, one token a row, ten steps a round."""
    sides, costs, rows = models(), ModelCosts(labkit.load(MODEL, graph="adapter").config), []
    sides.pop("mlx-lm, 4 bits, bfloat16")
    for context in CONTEXTS:
        for batch in BATCHES if context == min(CONTEXTS) else (1,):
            steps = {name: _steps(model, context, batch, sides["native"]) for name, model in sides.items()}
            ours = steps.pop("native")
            operations = costs.decode_operations(context, batch)
            speed = rates["gflops_one_thread"] * 1e9
            for name, step in steps.items():
                runs = paired(step, ours, rounds=arguments.rounds)
                rows.append(
                    {
                        "context": context,
                        "rows": batch,
                        "beside": name,
                        "floor_tok_s": batch * speed / operations,
                        "predicted_tok_s": EXPECTED["step"] * batch * speed / operations,
                        **_speeds(runs, STEPS * batch),
                    }
                )
    return rows


STEPS = 10


def _steps(model: Model, context: int, batch: int, reader: Model) -> Callable[[], mx.array]:
    """Steps of `model` behind a prompt that `reader` has read: caches may move between graphs."""
    prompt = mx.array(np.random.RandomState(1).randint(0, 8000, (1, context)).astype(np.int32))
    rows = []
    for _ in range(batch):
        rows.append(model.make_caches())
        reader(prompt, rows[-1], Rows.single(), logits=None)
        mx.eval([cache.state for cache in rows[-1]])
    caches = rows[0] if batch == 1 else [type(layer[0]).merge(layer) for layer in zip(*rows, strict=True)]
    position = context

    def step() -> mx.array:
        nonlocal position
        token = mx.full((batch, 1), 5, mx.int32)
        for _ in range(STEPS):
            logits = model(token, caches, Rows.batch([position] * batch)).logits
            token = mx.argmax(logits, axis=-1).astype(mx.int32)
            mx.eval(token)
            position += 1
        return token

    return step


def _speeds(runs: Any, tokens: int) -> dict[str, Any]:
    return {
        "measured_tok_s": tokens / min(runs.second),
        "beside_tok_s": tokens / min(runs.first),
        "times_faster": min(runs.first) / min(runs.second),
        "median_ratio": runs.ratio,
        "ratio_interval": [runs.ratio_low, runs.ratio_high],
    }


def torch(rates: dict[str, float], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """transformers' torch in a process of its own, and the native graph just before and after it."""
    if not arguments.torch:
        return []
    from labkit.models.zoo import tiny_hybrid
    from labkit.parity.transformers_layout import export

    model = labkit.load(MODEL, graph="native").model
    prompts = {
        length: mx.array(np.random.RandomState(0).randint(0, 8000, (1, length)).astype(np.int32)) for length in PROMPTS
    }
    prefills = {n: partial(lambda t: model(t, model.make_caches(), Rows.single()), t) for n, t in prompts.items()}
    steps = {context: _steps(model, context, 1, model) for context in CONTEXTS}
    ours = lambda calls: {n: min(timed(call) for _ in range(arguments.rounds)) for n, call in calls.items()}
    before = ours(prefills), ours(steps)
    with tempfile.TemporaryDirectory() as folder:
        export(tiny_hybrid(), folder)
        lists = ["--prompts", *map(str, PROMPTS), "--contexts", *map(str, CONTEXTS)]
        command = [
            arguments.torch,
            "-m",
            "recipes.measured.cpu_torch",
            folder,
            *lists,
            "--rounds",
            str(arguments.rounds),
        ]
        threads = ["--threads", str(all_workers().threads)]
        said = subprocess.run([*command, *threads], capture_output=True, text=True, check=True).stdout
    theirs = json.loads(said.strip().splitlines()[-1])
    after = ours(prefills), ours(steps)
    rows = []
    for kind, index, scale in (("prompt", 0, None), ("step", 1, STEPS)):
        for size, seconds in theirs[f"{kind}_s"].items():
            best = min(before[index][int(size)], after[index][int(size)]) / (scale or 1)
            tokens = int(size) if kind == "prompt" else 1
            speeds = {"measured_tok_s": tokens / best, "torch_tok_s": tokens / seconds, "times_faster": seconds / best}
            versions = {name: theirs[name] for name in ("torch", "transformers")}
            rows.append({"what": kind, "tokens or context": int(size), **speeds, **versions})
    return rows


# -- shared ------------------------------------------------------------------------------------------------------------


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call, its arrays computed."""
    begin = time.perf_counter()
    result = call()
    if isinstance(result, mx.array):
        mx.eval(result)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
