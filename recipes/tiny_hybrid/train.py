"""Train tiny-hybrid on one GPU for a given wall-clock time, in one call or several.

    python -m recipes.tiny_hybrid.train --tokens /tmp/tokens --state /tmp/state.pt --out OUT --seconds 600

The schedule follows the clock, so the decay of the learning rate always completes. The first part of the time uses
batches of schedule.PHASES[0], the rest those of PHASES[1]. Every two minutes, at the end, and on SIGTERM or Ctrl-C the
run writes its state (with the optimiser) to --state, and bf16 weights in parts below 16 MiB and training.json to OUT. A
later call with the same --state goes on from there with new --seconds; --start begins with the weights of a finished
run, or with the shipped ones. Tokens are made, where they are not there, while the model is prepared.
"""

import argparse
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

from . import checkpoint, fast, kernel_times, schedule, trunk
from .optimiser import MuonAdamW
from .run import Run
from .step import Step


def prepare(changes: dict, device: torch.device, phases: list) -> tuple[trunk.TinyHybrid, MuonAdamW, list[Step]]:
    model = trunk.build(schedule.SEED, **changes).to(device)
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


def tokenise(arguments: argparse.Namespace) -> subprocess.Popen:
    """Start making the token files in another process."""
    command = [sys.executable, "-m", "recipes.tiny_hybrid.tokens", "--out", str(arguments.tokens)]
    for name in ("corpora", "tokenizer", "heldout"):
        command += [f"--{name}", str(getattr(arguments, name))]
    return subprocess.Popen(command)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=Path, required=True, help="folder of token files, made where they are missing")
    parser.add_argument("--corpora", type=Path, default=Path(".corpora"))
    parser.add_argument("--tokenizer", type=Path, default=Path("data/models/tiny-hybrid"))
    parser.add_argument("--heldout", type=Path, default=Path("data/heldout"))
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="begin with the weights in this folder: a finished run, or shipped")
    parser.add_argument("--seconds", type=float, default=math.inf, help="training time of this call")
    parser.add_argument(
        "--deadline", type=float, default=math.inf, help="Unix time at which training ends at the latest"
    )
    parser.add_argument("--steps", type=int, default=math.inf, help="end after so many steps, for a trial")
    parser.add_argument("--keep-every", type=float, default=120.0, help="seconds between checkpoints, of a second each")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", type=json.loads, default={}, help="JSON changes to shape.TRUNK, for a trial")
    parser.add_argument("--phases", type=json.loads, default=schedule.PHASES, help="JSON in place of schedule.PHASES")
    arguments = parser.parse_args()
    if all(map(math.isinf, (arguments.seconds, arguments.deadline, arguments.steps))):
        parser.error("give --seconds, --deadline or --steps: the schedule needs an end")
    try:
        arguments.phases = schedule.check_phases(arguments.phases)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main() -> None:
    arguments = parse()
    torch.set_float32_matmul_precision("high")
    began = time.monotonic()
    making = tokenise(arguments)
    device = torch.device(arguments.device)
    model, optimiser, steps = prepare(arguments.shape, device, arguments.phases)
    print(f"ready after {time.monotonic() - began:.1f} s: {trunk.count(model)}", flush=True)
    if making.wait():
        raise SystemExit("the token files could not be made (see above)")
    run = Run(model, optimiser, arguments.tokens, arguments.phases, steps)
    resumed = arguments.state.exists()
    if arguments.start and not resumed:
        checkpoint.start_from(run, arguments.start)
    run.load_data(schedule.SEED + len(run.record["earlier"]))
    if resumed:
        checkpoint.resume(run, arguments.state)
    run.record["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    run.record["versions"] = {"torch": str(torch.__version__), "transformers": transformers.__version__}
    print(f"data after {time.monotonic() - began:.1f} s: {run.data[0].sizes}", flush=True)
    for end in (signal.SIGTERM, signal.SIGINT):
        signal.signal(end, run.stop)
    left = min(arguments.seconds, arguments.deadline - time.time())
    keep = lambda: checkpoint.save(run, arguments.state, arguments.out)
    try:
        run.train(left, keep, arguments.keep_every, arguments.steps)
    except (TimeoutError, FloatingPointError) as error:
        raise SystemExit(f"{error}; nothing was written since the last checkpoint") from error
    if not run.stopped:
        run.record["kernels"] = kernel_times.of(steps[-1], run.data[-1].batch(steps[-1].rows))
        checkpoint.save_record(run, arguments.out)
    record = run.record
    print(
        f"saved: {record['elapsed']:.0f} s, {record['step']} steps, {record['tokens'] / 1e6:.1f} M tokens", flush=True
    )


if __name__ == "__main__":
    main()
