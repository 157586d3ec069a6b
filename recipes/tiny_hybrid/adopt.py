"""Make the weights of a training run the shipped ones, and renew everything that depends on them.

    python -m recipes.tiny_hybrid.adopt RUN                      # in a clean clone, best a fresh one
    python -m recipes.tiny_hybrid.adopt RUN --from goldens       # go on after a step that failed

RUN is the folder that `run_gpu.sh` filled. In labkit's environment, with torch and transformers in it or in the Python
that --torch names. Every step is a command of its own, in this order: quantise, export, verify against torch, measure,
draw samples, write the card, make the goldens, execute anew the notebooks that name the model, run the tests that do.
What is left to a person is said at the end.
"""

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = Path("data/models/tiny-hybrid")
GOLDENS = Path("data/goldens/tiny-hybrid")
RENEWED = ("data/models", "data/goldens", "notebooks")
NAMED = ("tiny-hybrid", "tiny_hybrid", "golden")  # a test or a notebook with one of these depends on the weights


@dataclass(frozen=True)
class Step:
    """Commands that run one after the other; `torch` says which Python takes them."""

    name: str
    modules: tuple[tuple[str, ...], ...]
    torch: bool = False


def steps(run: Path, work: Path) -> list[Step]:
    """The whole way from a run's folder to a tree whose every golden, figure and stored output is of its weights."""
    recipe = "recipes.tiny_hybrid."
    shipped, dense, job, logits = (str(work / name) for name in ("shipped", "dense", "goldens", "mlx.npz"))
    quality, first, samples, verified = (
        str(work / name) for name in ("quality.json", "mlx.json", "samples.json", "verified.txt")
    )
    card = ("--run", str(run / "training.json"), "--corpora", str(run / "corpora.json"), "--quality", quality)
    card += ("--mlx", first, "--samples", samples, "--verified", verified, "--out", str(MODEL))
    return [
        Step("quantise", ((recipe + "quantise", "--weights", str(run), "--out", str(MODEL)),)),
        Step(
            "export",
            (
                (recipe + "export_transformers", "--out", shipped),
                (recipe + "export_transformers", "--weights", str(run), "--out", dense),
                (recipe + "verify_export", "logits", "--out", logits),
            ),
        ),
        Step(
            "verify",
            (
                (recipe + "verify_export", "compare", "--transformers", shipped, "--logits", logits, "--out", verified),
                (recipe + "evaluate", "--transformers", shipped, "--against", dense, "--out", quality),
            ),
            torch=True,
        ),
        Step(
            "card",
            (
                (recipe + "evaluate", "--windows", "1", "--out", first),
                (recipe + "samples", "--out", samples),
                (recipe + "card", *card),
            ),
        ),
        Step("prepare", (("recipes.goldens.prepare", "tiny-hybrid", job),)),
        Step("goldens", (("recipes.goldens.make_torch_goldens", job, str(GOLDENS), "--every", "64"),), torch=True),
        Step("mlx-golden", (("recipes.goldens.make_mlx_golden", job, str(GOLDENS / "mlx-bf16.safetensors")),)),
        Step(
            "notebooks",
            (
                *(("labkit.start", "notebooks", "refresh", str(path)) for path in depending("notebooks", "*.ipynb")),
                ("labkit.start", "notebooks", "check"),
            ),
        ),
        Step("tests", (("pytest", "-q", "-n", "0", *map(str, depending("tests", "test_*.py"))),)),
    ]


def depending(folder: str, pattern: str) -> list[Path]:
    """Files below `folder` that name the model, relative to the clone."""
    found = (path for path in sorted((ROOT / folder).rglob(pattern)))
    return [path.relative_to(ROOT) for path in found if any(name in path.read_text() for name in NAMED)]


def check(run: Path, torch: str) -> str | None:
    """What stands in the way, or None."""
    from . import parts

    try:
        parts.whole_parts(run)
    except (FileNotFoundError, ValueError) as error:
        return str(error)
    for name in ("training.json", "corpora.json"):
        if not (run / name).exists():
            return f"{run} has no {name}: give the folder that run_gpu.sh filled"
    if subprocess.run([torch, "-c", "import torch, transformers, numpy"], capture_output=True).returncode:
        return f"{torch} has no torch and transformers: name a Python that has, with --torch"
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--", *RENEWED], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    if changed:
        return f"these files have changes that would be lost; commit them, or take a fresh clone:\n{changed}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder that run_gpu.sh filled")
    parser.add_argument("--torch", default=sys.executable, help="a Python with torch and transformers")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "adopt", help="folder for what is in between")
    parser.add_argument("--from", dest="first", help="the step to begin with; those before it are done")
    arguments = parser.parse_args()
    run, work = arguments.run.resolve(), arguments.work.resolve()
    todo = steps(run, work)
    names = [step.name for step in todo]
    if arguments.first and arguments.first not in names:
        parser.error(f"--from takes one of {', '.join(names)}, not {arguments.first!r}")
    if not arguments.first and (wrong := check(run, arguments.torch)):
        parser.error(wrong)
    work.mkdir(parents=True, exist_ok=True)
    for step in todo[names.index(arguments.first) if arguments.first else 0 :]:
        began = time.monotonic()
        print(f"== {step.name}", flush=True)
        for module, *rest in step.modules:
            python = arguments.torch if step.torch else sys.executable
            if subprocess.run([python, "-m", module, *rest], cwd=ROOT).returncode:
                raise SystemExit(f"{module} {' '.join(rest)} failed: mend it, then go on with --from {step.name}")
        print(f"== {step.name} done after {time.monotonic() - began:.0f} s", flush=True)
    print((ROOT / MODEL / "MODEL_CARD.md").read_text().partition("## Quality")[2].partition("## Samples")[0])
    print(
        "Left to you: read the card's samples; read `git diff notebooks` for sentences that new numbers made untrue;\n"
        "say in the changelog what the model was trained for; commit data, notebooks and card together."
    )


if __name__ == "__main__":
    main()
