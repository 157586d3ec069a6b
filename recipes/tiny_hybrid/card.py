"""Write the model card and its plots from the run's record and the evaluations, and the record beside them.

    python -m recipes.tiny_hybrid.card --run RUN/training.json --corpora RUN/corpora.json --quality quality.json \\
        --mlx mlx.json --samples samples.json --verified verified.txt --out data/models/tiny-hybrid
"""

import argparse
import json
import shutil
from pathlib import Path
from string import Template

import matplotlib
import numpy as np

matplotlib.use("svg")
import matplotlib.pyplot as plt

from . import schedule, shape

plt.rcParams.update(
    {
        "svg.hashsalt": "tiny-hybrid",
        "svg.fonttype": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 9,
    }
)


def _save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


def plot_curves(run: dict, path: Path) -> None:
    """Loss and held-out bits per byte above, learning rate and throughput below, over tokens."""
    curve = np.array([row[:11] for row in run["curve"]], dtype=float)
    curve = curve[:: max(1, len(curve) // 400)]
    millions = curve[:, 2] / 1e6
    figure, axes = plt.subplots(2, 2, figsize=(9, 5), sharex=True, layout="tight")
    axes[0, 0].plot(millions, curve[:, 5], lw=0.8, label="next token")
    axes[0, 0].plot(millions, curve[:, 6], lw=0.8, label="token after next (MTP)")
    axes[0, 0].set_ylabel("training loss (nats)")
    axes[0, 0].set_ylim(top=min(6.0, curve[:, 6].max()))
    axes[0, 0].legend(frameon=False)
    at = [np.interp(step, curve[:, 0], millions) for step, _, _ in run["evals"]]
    for name in run["evals"][-1][2]:
        axes[0, 1].plot(
            at, [bits[name] for _, _, bits in run["evals"]], marker=".", lw=2 if name == "all" else 0.8, label=name
        )
    axes[0, 1].set_ylabel("held-out bits per byte")
    axes[0, 1].legend(frameon=False, fontsize=7, ncols=2, loc="upper right")
    axes[0, 1].set_ylim(0, 1.4 * max(max(bits.values()) for _, _, bits in run["evals"]))
    axes[1, 0].plot(millions, curve[:, 3])
    axes[1, 0].set_ylabel("learning rate")
    axes[1, 1].plot(millions, curve[:, 8] / 1e3, lw=0.8)
    axes[1, 1].set_ylabel("thousand tokens a second")
    axes[1, 1].set_ylim(0)
    for axis in axes[1]:
        axis.set_xlabel("million tokens")
    _save(figure, path)


def plot_loads(run: dict, path: Path) -> None:
    """Share of tokens that each expert of each layer received, 1.0 = an even spread."""
    loads = np.array(run["loads"])
    figure, axis = plt.subplots(figsize=(9, 2.8))
    image = axis.imshow(loads * loads.shape[1], aspect="auto", cmap="viridis", vmin=0)
    axis.set_yticks(range(len(loads)), [f"layer {i}" for i in range(len(loads) - 1)] + ["MTP"])
    axis.set_xlabel("expert")
    figure.colorbar(image, label="load, 1 = even")
    _save(figure, path)


def table(header: list[str], rows: list[list[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def fields(run: dict, corpora: dict, quality: dict, mlx: dict, samples: list[dict], facts: dict) -> dict[str, str]:
    """Every value that the card's template names."""
    parameters, trunk, phases = run["sizes"]["parameters"], shape.TRUNK, run["phases"]
    tokens = run["sizes"]["tokens"]
    weighted = sum(count * shape.GROUP_WEIGHTS[group] for group, count in tokens.items())
    loads = np.array(run["loads"]) * trunk["num_experts"]
    whole = quality["all"]
    rows = {**quality["texts"], "**all**": whole}
    first = {**mlx["texts"], "**all**": mlx["all"]}
    kinds = {group: f"{count / 1e6:.1f} (weight {shape.GROUP_WEIGHTS[group]:g})" for group, count in tokens.items()}
    overlap = corpora["heldout_overlap"]
    scores = [
        [
            name,
            row["bytes"],
            f"{row['against_bits_per_byte']:.4f}",
            f"{row['bits_per_byte']:.4f}",
            f"{first[name]['bits_per_byte']:.4f} ({first[name]['tokens']} tokens)",
        ]
        for name, row in rows.items()
    ]
    sources = [
        [name, source["licence"], source["group"], f"{source['characters'] / 1e6:.2f}"]
        for name, source in corpora["sources"].items()
    ]
    return {
        **{key: str(value) for key, value in trunk.items() if not isinstance(value, dict)},
        **{key: f"{value:g}" for key, value in vars(schedule).items() if isinstance(value, int | float)},
        **facts,
        "device": f"{run['device']}, " + ", ".join(f"{name} {number}" for name, number in run["versions"].items()),
        "began": began(run),
        "SEED": str(run["seed"]),
        "parameters_trunk": f"{parameters['trunk']:,}",
        "parameters_head": f"{parameters['mtp']:,}",
        "contexts": " then ".join(str(length) for length in dict.fromkeys(phase[2] for phase in phases)),
        "window": str(quality["window"]),
        "scores": table(["text", "bytes", "dense", "4 bit", "MLX, first window"], scores),
        "cost": f"{whole['bits_per_byte'] - whole['against_bits_per_byte']:+.4f}",
        "agreement": f"{whole['top1_agreement']:.2%}",
        "kl": f"{whole['mean_kl_nats']:.4f}",
        "positions": f"{whole['tokens']:,}",
        "load_least": f"{loads.min():.2f}",
        "load_most": f"{loads.max():.2f}",
        "samples": samples_text(samples),
        "steps": f"{run['step']:,}",
        "millions": f"{run['tokens'] / 1e6:.1f}",
        "passes": f"{run['tokens'] / weighted:.2f}",
        "unique": f"{sum(tokens.values()) / 1e6:.1f}",
        "seconds": f"{run['elapsed']:.0f}",
        "speed": f"{np.median([row[8] for row in run['curve']]) / 1e3:.0f}",
        "batches": "; ".join(f"{rows} x {length} from step {begun}" for begun, rows, length, _ in phases),
        "sources": table(["source", "licence", "group", "M characters"], sources),
        "groups": ", ".join(f"{group} {text}" for group, text in kinds.items()),
        "overlap": table(
            ["text", "13 words", "8 words"],
            [[name, f"{overlap['13'][name]:.2%}", f"{overlap['8'][name]:.2%}"] for name in overlap["13"]],
        ),
    }


def began(run: dict) -> str:
    """What the run began with: random weights, or the weights of earlier runs, first one first."""
    runs = [
        f"{one['step']:,} steps, {one['tokens'] / 1e6:.1f} M tokens, {one['elapsed']:.0f} s on {one['device']}"
        for one in run["earlier"]
    ]
    return run["started_from"] + "".join(f"; before: {text}" for text in runs)


def samples_text(samples: list[dict]) -> str:
    """One quoted block a sample."""
    blocks = []
    for sample in samples:
        chat = f"chat, thinking {'on' if sample['thinking'] else 'off'}" if sample.get("chat") else "text"
        head = f"{chat}, temperature {sample['temperature']:g}"
        prompt = sample["prompt"] + (" → " if sample.get("chat") else "")
        blocks.append(f"{head}:\n```\n[{prompt}]{sample['text']}\n```")
    return "\n\n".join(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("run", "corpora", "quality", "mlx", "samples", "verified", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    read = lambda path: json.loads(path.read_text())
    run = read(arguments.run)
    shutil.copyfile(arguments.run, arguments.out / "training.json")
    plot_curves(run, arguments.out / "training.svg")
    plot_loads(run, arguments.out / "router_load.svg")
    size = (arguments.out / "model.safetensors").stat().st_size
    facts = {"verified": arguments.verified.read_text().strip(), "size": f"{size:,}"}
    inputs = [read(path) for path in (arguments.corpora, arguments.quality, arguments.mlx, arguments.samples)]
    template = Template((Path(__file__).parent / "card_template.md").read_text())
    (arguments.out / "MODEL_CARD.md").write_text(template.substitute(fields(run, *inputs, facts)))


if __name__ == "__main__":
    main()
