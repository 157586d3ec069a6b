"""The course of a training run: phases, schedule, log, held-out looks, and when it ends."""

import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from . import fast, shape, tokens, trunk
from .data import Windows
from .optimiser import MuonAdamW
from .schedule import Phase, learning_rate
from .step import Step

LOG_EVERY = 20
EVAL_EVERY = 60.0  # seconds


@torch.no_grad()
def bits_per_byte(model: trunk.TinyHybrid, folder: Path, length: int = 1024) -> dict[str, float]:
    """Held-out bits per byte of each text and of all: bf16, separate windows of `length` tokens. A look, not the card's
    figure.
    """
    sizes, bits = tokens.heldout_sizes(folder), {}
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


class Run:
    """One training run, in one call or several; `record` is what training.json holds."""

    def __init__(
        self, model: trunk.TinyHybrid, optimiser: MuonAdamW, folder: Path, phases: list[Phase], steps: list[Step]
    ) -> None:
        self.model, self.optimiser, self.folder, self.phases, self.steps = model, optimiser, folder, phases, steps
        self.device = model.embedding.device
        self.data: list[Windows] = []
        self.stopped = False
        self.finish = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        self.record = {"step": 0, "elapsed": 0.0, "tokens": 0, "curve": [], "evals": [], "loads": [], "phases": []}
        self.record |= {"earlier": [], "started_from": "random weights"}

    def load_data(self, seed: int) -> None:
        """Training windows; another seed shows a run that starts from trained weights its texts in another order."""
        self.data = [Windows(self.folder, step.length + 2, self.device, seed) for step in self.steps]
        self.record["seed"] = seed
        self.record["sizes"] = {"parameters": trunk.count(self.model), "tokens": self.data[0].sizes}

    def stop(self, *_: object) -> None:
        """End after the step under way, as a signal's handler does."""
        self.stopped = True

    def train(self, seconds: float, keep: Callable[[], None], keep_every: float, steps: float = math.inf) -> None:
        """Train for `seconds` or `steps`, whichever ends first, or until stopped; phases and the learning rate's decay
        follow the share of them that is used. `keep` is called every `keep_every` seconds, and at the end.

        Raises:
            FloatingPointError: the loss is no number any more; what was kept last stands.
            TimeoutError: there is no time to train.
        """
        record, blocks = self.record, fast.moe_blocks(self.model)
        start, before = time.monotonic(), record["elapsed"]
        total, most, last, last_eval, last_kept = before + seconds, record["step"] + steps, start, start, start
        if seconds <= 0:
            raise TimeoutError("no time is left to train: preparing took all of it")
        since, current = 0, None
        while (share := max(record["elapsed"] / total, record["step"] / most)) < 1.0 and not self.stopped:
            phase = next(i for i, (_, _, until) in enumerate(self.phases) if share < until)
            step, data = self.steps[phase], self.data[phase]
            if step is not current:
                current, since, last = step, 0, time.monotonic()
                self._enter(step, blocks)
            rate = learning_rate(record["step"], share)
            step(data.batch(step.rows), rate)
            record["step"] += 1
            record["tokens"] += step.rows * step.length
            since += 1
            ended = record["step"] >= most
            if record["step"] % LOG_EVERY and not ended and not self.stopped:
                continue
            losses = [round(value / since, 4) for value in step.losses.tolist()]
            now = time.monotonic()
            record["elapsed"] = before + now - start
            self._log(rate, losses, since * step.rows * step.length / (now - last), blocks)
            ended = ended or record["elapsed"] >= total
            if (now - last_eval > EVAL_EVERY or ended) and not self.stopped:
                self._evaluate()
                last_eval = time.monotonic()
            if now - last_kept > keep_every and not ended:
                keep()
                last_kept = time.monotonic()
            self._clear(step, blocks)
            self.finish()
            last, since = time.monotonic(), 0
        keep()

    def _enter(self, step: Step, blocks: list) -> None:
        phases = self.record["phases"]
        if not phases or phases[-1][1:3] != [step.rows, step.length]:
            phases.append([self.record["step"], step.rows, step.length, step.graph is not None])
        self._clear(step, blocks)

    def _clear(self, step: Step, blocks: list) -> None:
        step.losses.zero_()
        for block in blocks:
            block.load.zero_()

    def _log(self, rate: float, losses: list[float], speed: float, blocks: list) -> None:
        record = self.record
        if not all(map(math.isfinite, losses)):
            raise FloatingPointError(f"the loss is not finite at step {record['step']}: {losses}")
        load = torch.stack([block.load for block in blocks])
        share = load / load.sum(-1, keepdim=True)
        entropy = (-(share * share.clamp_min(1e-9).log()).sum(-1) / math.log(share.shape[-1])).min().item()
        elapsed = round(record["elapsed"], 2)
        record["curve"].append(
            [record["step"], elapsed, record["tokens"], rate, *losses, round(speed), round(entropy, 4)]
        )
        record["loads"] = share.tolist()
        if record["step"] % (5 * LOG_EVERY) == 0:
            line = f"step {record['step']} t={elapsed:.0f} lr={rate:.2e} loss={losses} {speed / 1e3:.0f}k tok/s"
            print(f"{line} load entropy>={entropy:.3f}", flush=True)

    def _evaluate(self) -> None:
        found = bits_per_byte(self.model, self.folder)
        self.record["evals"].append([self.record["step"], round(self.record["elapsed"], 2), found])
        print(f"  held out: { {name: round(value, 3) for name, value in found.items()} }", flush=True)
