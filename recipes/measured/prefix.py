"""Restoring a prefix against computing it, on this machine.

    python -m recipes.measured.prefix --out data/measured --commit $(git rev-parse --short HEAD)              # a CPU
    python -m recipes.measured.prefix --out OUT --commit SHA --shape qwen3.6-35b-a3b --width 2048 --name h200  # a GPU

Without `--shape` it is tiny-hybrid. Lengths that `--seconds` do not reach are left out.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import labkit
from labkit.measure import restoring
from labkit.measure.end_to_end.subject import open_subject
from recipes.measured.table import Table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--shape", help="a shape of data/configs, with random weights")
    parser.add_argument("--graph", default="auto")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, to try the script")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--lengths", type=int, nargs="*", help="in blocks; 1 2 4 8 16 32 without")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="of measuring, after the model is there")
    parser.add_argument("--name", default="cpu", help="prefix of the file")
    arguments = parser.parse_args()
    model = _synthetic(arguments) if arguments.shape else labkit.load("tiny-hybrid", graph=arguments.graph)
    table = Table(
        arguments.out / f"{arguments.name}_prefix.json",
        arguments.commit,
        model=arguments.shape or "tiny-hybrid",
        layers=arguments.layers,
        graph=type(model.model).__name__,
        width=arguments.width,
        page_cache="warm: files are read, checked and copied, but not from the platter",
    )
    lengths = [blocks * arguments.width for blocks in arguments.lengths or (1, 2, 4, 8, 16, 32)]
    with tempfile.TemporaryDirectory() as folder:
        rows = restoring.measure(
            model,
            Path(folder) / "store",
            lengths,
            width=arguments.width,
            rounds=arguments.rounds,
            seconds=arguments.seconds,
        )
    table.rows = [row.as_record() for row in rows]
    table.write()
    for row in rows:
        print(
            f"{row.tokens} tokens, {row.bytes / 1e6:.1f} MB: prefill {row.prefill_seconds:.4f} s, "
            f"memory {row.memory_seconds:.4f} s ({row.memory_ratio:.1f}x), "
            f"disk {row.disk_seconds:.4f} s ({row.disk_ratio:.1f}x), commit {row.commit_seconds:.4f} s, "
            f"prefill between commits {row.between_seconds:.4f} s",
            flush=True,
        )


def _synthetic(arguments: argparse.Namespace):
    begin = time.perf_counter()
    subject = open_subject(arguments.shape, graph=arguments.graph, layers=arguments.layers)
    print(f"{arguments.shape} built in {time.perf_counter() - begin:.0f} s", flush=True)
    return subject


if __name__ == "__main__":
    main()
