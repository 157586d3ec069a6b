"""Train tiny-hybrid on one GPU for a given wall-clock time, in one call or several.

    python -m recipes.tiny_hybrid.train --tokens /tmp/tokens --state /tmp/state.pt --out OUT --seconds 600

The schedule follows the clock, so the decay of the learning rate always completes. The first part of the time uses
batches of PHASES[0], the rest those of PHASES[1]. A later call with the same `--state` (which keeps the optimiser)
continues with new `--seconds`. Each call writes bf16 weights to OUT in parts below 16 MiB, and `curves.json`.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch

from . import fast, shape, tokens, trunk
from .data import Windows
from .optimiser import MuonAdamW
from .parts import load_parts, save_parts
from .schedule import PHASES, SEED, learning_rate
from .step import Step

LOG_EVERY = 20
EVAL_EVERY = 60.0  # seconds


@torch.no_grad()
def bits_per_byte(model: trunk.TinyHybrid, folder: Path, length: int = 1024) -> dict[str, float]:
    """Held-out bits per byte of each text and of all: bf16, separate windows of `length` tokens. A look, not the card's
    figure.
    """
    sizes = json.loads((folder / tokens.DONE).read_text())
    bits = {}
    for name in sizes:
        ids = torch.from_numpy(np.load(folder / "heldout" / f"{name}.npy").astype(np.int64)).to(model.embedding.device)
        ids = torch.cat([ids.new_tensor([shape.END_OF_TEXT]), ids])
        total = torch.zeros((), device=ids.device)
        for start in range(0, ids.numel() - 1, length):
            window = ids[start : start + length + 1]
            hidden = model.hidden(window[None, :-1], model.rotary(1, window.numel() - 1))
            logits = (hidden[0] @ model.embedding.T).float()
            total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum")
        bits[name] = total.item() / math.log(2)
    found = {name: bits[name] / size for name, size in sizes.items()}
    return {**found, "all": sum(bits.values()) / sum(sizes.values())}


def wait_for(path: Path, patience: float = 300.0) -> None:
    """The tokens may still be in the making, in another process."""
    began = time.monotonic()
    while not path.exists():
        if time.monotonic() - began > patience:
            raise FileNotFoundError(f"{path} did not appear within {patience:.0f} s: run recipes.tiny_hybrid.tokens")
        time.sleep(0.5)


class Run:
    """The course of a run: phases, schedule, log; `record` is what curves.json holds."""

    def __init__(self, model: trunk.TinyHybrid, optimiser: MuonAdamW, folder: Path, steps: list[Step]) -> None:
        self.model, self.optimiser, self.folder, self.steps = model, optimiser, folder, steps
        self.device = model.embedding.device
        self.record = {"step": 0, "elapsed": 0.0, "tokens": 0, "curve": [], "evals": [], "loads": [], "phases": []}
        self.data: list[Windows] = []
        self.finish = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None

    def load_data(self) -> None:
        self.data = [Windows(self.folder, step.length + 2, self.device, SEED) for step in self.steps]

    def train(self, seconds: float) -> None:
        record, blocks = self.record, fast.moe_blocks(self.model)
        start, before = time.monotonic(), record["elapsed"]
        total, last, last_eval, since, current = before + seconds, start, start, 0, None
        while record["elapsed"] < total:
            share = record["elapsed"] / total
            phase = next(i for i, (_, _, until) in enumerate(PHASES) if share < until)
            step, data = self.steps[phase], self.data[phase]
            if step is not current:
                current = step
                record["phases"].append([record["step"], step.rows, step.length, step.graph is not None])
                step.losses.zero_()
                for block in blocks:
                    block.load.zero_()
            rate = learning_rate(record["step"], share)
            step(data.batch(step.rows), rate)
            record["step"] += 1
            record["tokens"] += step.rows * step.length
            since += 1
            if record["step"] % LOG_EVERY:
                continue
            losses = [round(value / since, 4) for value in step.losses.tolist()]
            now = time.monotonic()
            record["elapsed"] = before + now - start
            self._log(rate, losses, since * step.rows * step.length / (now - last), blocks)
            if now - last_eval > EVAL_EVERY or record["elapsed"] >= total:
                self._evaluate()
                last_eval = time.monotonic()
            step.losses.zero_()
            for block in blocks:
                block.load.zero_()
            self.finish()
            last, since = time.monotonic(), 0

    def _log(self, rate: float, losses: list[float], speed: float, blocks: list) -> None:
        record = self.record
        load = torch.stack([block.load for block in blocks])
        share = load / load.sum(-1, keepdim=True)
        entropy = (-(share * share.clamp_min(1e-9).log()).sum(-1) / math.log(share.shape[-1])).min().item()
        elapsed = round(record["elapsed"], 2)
        record["curve"].append(
            [record["step"], elapsed, record["tokens"], rate, *losses, round(speed), round(entropy, 4)]
        )
        record["loads"] = share.tolist()
        if not all(map(math.isfinite, losses)):
            raise FloatingPointError(f"the loss is not finite at step {record['step']}: {losses}")
        if record["step"] % (5 * LOG_EVERY) == 0:
            line = f"step {record['step']} t={elapsed:.0f} lr={rate:.2e} loss={losses} {speed / 1e3:.0f}k tok/s"
            print(f"{line} load entropy>={entropy:.3f}", flush=True)

    def _evaluate(self) -> None:
        found = bits_per_byte(self.model, self.folder)
        self.record["evals"].append([self.record["step"], round(self.record["elapsed"], 2), found])
        print(f"  held out: { {name: round(value, 3) for name, value in found.items()} }", flush=True)


def prepare(changes: dict, device: torch.device, phases: tuple) -> tuple[trunk.TinyHybrid, MuonAdamW, list[Step]]:
    model = trunk.build(SEED, **changes).to(device)
    if device.type == "cuda":
        model = model.to(torch.bfloat16)
    model.trunk.model.rotary_emb.float()
    fast.install(model)
    for block in fast.moe_blocks(model):
        block.load = torch.zeros(block.gate.num_experts, device=device)
    optimiser = MuonAdamW(model)
    steps = [Step(model, optimiser, rows, length) for rows, length, _ in phases]
    for step in steps:
        if device.type == "cuda":
            step.capture()
    return model, optimiser, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--weights", type=Path, help="start from the weights of a finished run (a fresh optimiser)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="training time of this call")
    parser.add_argument(
        "--deadline", type=float, default=math.inf, help="Unix time at which training ends at the latest"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="{}", help="JSON changes to shape.TRUNK, for a trial on a CPU")
    arguments = parser.parse_args()
    if math.isinf(arguments.seconds) and math.isinf(arguments.deadline):
        parser.error("give --seconds, --deadline or both: the schedule needs an end")
    torch.set_float32_matmul_precision("high")
    began = time.monotonic()
    model, optimiser, steps = prepare(json.loads(arguments.shape), torch.device(arguments.device), PHASES)
    print(f"ready after {time.monotonic() - began:.1f} s: {trunk.count(model)}", flush=True)
    run = Run(model, optimiser, arguments.tokens, steps)
    wait_for(arguments.tokens / tokens.DONE)
    run.load_data()
    print(f"data after {time.monotonic() - began:.1f} s: {run.data[0].sizes}", flush=True)
    if arguments.weights:
        optimiser.load_weights(model, load_parts(arguments.weights))
    if arguments.state.exists():
        saved = torch.load(arguments.state, map_location=run.device, weights_only=False)
        run.record = saved["record"]
        optimiser.load_state_dict(saved["optimiser"])
        for data, place in zip(run.data, saved["places"], strict=True):
            data.go_to(*place)
    try:
        run.train(min(arguments.seconds, arguments.deadline - time.time()))
    finally:
        save(run, arguments)


def save(run: Run, arguments: argparse.Namespace) -> None:
    record = run.record
    print(
        f"saving: {record['elapsed']:.0f} s, {record['step']} steps, {record['tokens'] / 1e6:.1f} M tokens", flush=True
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    record["sizes"] = {"parameters": trunk.count(run.model), "tokens": run.data[0].sizes}
    (arguments.out / "curves.json").write_text(json.dumps(record))
    save_parts({name: parameter.detach().cpu() for name, parameter in run.model.named_parameters()}, arguments.out)
    places = [(data.round, data.cursor) for data in run.data]
    torch.save({"record": record, "optimiser": run.optimiser.state_dict(), "places": places}, arguments.state)


if __name__ == "__main__":
    main()
