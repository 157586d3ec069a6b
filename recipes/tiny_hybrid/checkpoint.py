"""What a training run leaves behind, each file whole or not at all: the state to go on from, the weights to ship."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from . import parts, shipped

if TYPE_CHECKING:
    from .run import Run

RECORD = "training.json"  # of a run's folder and of the shipped one: what was trained, on what, for how long
SUMMARY = ("step", "tokens", "elapsed", "device", "seed", "started_from")


def save(run: "Run", state: Path, out: Path) -> None:
    """The weights and the record to `out`, everything a later call needs to go on to `state`."""
    record = run.record
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: parameter.detach().cpu() for name, parameter in run.model.named_parameters()}
    parts.save_parts(tensors, out, record["step"])
    save_record(run, out)
    places = [(data.length, data.round, data.cursor) for data in run.data]
    kept = {"record": record, "optimiser": run.optimiser.state_dict(), "places": places}
    _replace(state, lambda path: torch.save(kept, path))


def save_record(run: "Run", out: Path) -> None:
    _replace(out / RECORD, lambda path: path.write_text(json.dumps(run.record)))


def resume(run: "Run", state: Path) -> None:
    """Go on where the call that wrote `state` stopped.

    Raises:
        ValueError: that call had batches of other lengths.
    """
    saved = torch.load(state, map_location=run.device, weights_only=True)
    lengths = [length for length, _, _ in saved["places"]]
    if lengths != [data.length for data in run.data]:
        raise ValueError(f"{state} is of a run with windows of {lengths} tokens: give its phases, or another --state")
    run.record = saved["record"]
    run.optimiser.load_state_dict(saved["optimiser"])
    for data, (_, round_, cursor) in zip(run.data, saved["places"], strict=True):
        data.go_to(round_, cursor)


def start_from(run: "Run", folder: Path) -> None:
    """Begin with the weights in `folder`, of a finished run or shipped, and with a fresh optimiser."""
    has_parts = any(folder.glob("weights-*.safetensors"))
    weights = parts.load_parts(folder) if has_parts else shipped.load_shipped(folder)
    run.optimiser.load_weights(run.model, {name: value.to(run.device) for name, value in weights.items()})
    before = json.loads((folder / RECORD).read_text())
    run.record["earlier"] = [*before.get("earlier", []), {key: before.get(key) for key in SUMMARY}]
    run.record["started_from"] = "trained weights" if has_parts else "shipped 4-bit weights"


def _replace(path: Path, write) -> None:
    scratch = path.with_suffix(".new")
    write(scratch)
    os.replace(scratch, path)
