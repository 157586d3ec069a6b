"""A training run that a CPU does in seconds: a small shape, texts that repeat themselves, the real tokenizer."""

import json
import os
import subprocess
import sys
from pathlib import Path

from recipes.tiny_hybrid import packed, shape

CLONE = Path(__file__).resolve().parents[2]
TOKENIZER = CLONE / "data" / "models" / "tiny-hybrid"
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
PHASES = [[4, 32, 0.5], [2, 64, 1.0]]


def write_texts(folder: Path) -> tuple[Path, Path]:
    """(corpora, held-out texts): every group says the same few sentences over and over."""
    corpora, heldout = folder / "corpora", folder / "heldout"
    corpora.mkdir()
    heldout.mkdir()
    for group in shape.GROUP_WEIGHTS:
        packed.write(corpora / f"{group}.txt.xz", [f"The {group} stands by the river, and the river runs. " * 40] * 4)
    (corpora / "corpora.json").write_text("{}")
    (heldout / "river.txt").write_text("The river stands by the manual, and the manual runs. " * 4)
    return corpora, heldout


def command(folder: Path, *more: str, seconds: float = 3000) -> tuple[list[str], dict[str, str]]:
    """(command line, environment) of run_gpu.sh on a CPU, whose whole state lies in `folder`."""
    corpora, heldout = folder / "corpora", folder / "heldout"
    script = CLONE / "recipes" / "tiny_hybrid" / "run_gpu.sh"
    line = ["sh", str(script), str(seconds), "--device", "cpu", "--shape", json.dumps(SHAPE)]
    line += ["--phases", json.dumps(PHASES), "--heldout", str(heldout), "--tokenizer", str(TOKENIZER), *more]
    places = {"OUT": "out", "TOKENS": "tokens", "STATE": "state.pt"}
    environment = {**os.environ, **{name: str(folder / place) for name, place in places.items()}}
    # One thread: on a busy machine torch's threads wait for each other for minutes.
    return line, {**environment, "CORPORA": str(corpora), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


def run(folder: Path, *more: str, seconds: float = 3000) -> subprocess.CompletedProcess:
    line, environment = command(folder, *more, seconds=seconds)
    return subprocess.run(line, env=environment, cwd=CLONE, capture_output=True, text=True, timeout=800)


def record(folder: Path) -> dict:
    return json.loads((folder / "out" / "training.json").read_text())
