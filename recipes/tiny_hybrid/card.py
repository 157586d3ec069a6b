"""Write the model card and its plots from the run's curves and the evaluations.

    python -m recipes.tiny_hybrid.card --curves curves.json --corpora .corpora/corpora.json --dense dense.json --quantised quantised.json \
        --samples samples.json --device "NVIDIA H200" --verified "..." --out data/models/tiny-hybrid
"""

import argparse
import json
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("svg")
import matplotlib.pyplot as plt

from . import shape, train

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
    figure, axes = plt.subplots(2, 2, figsize=(9, 5), sharex=True)
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
    axes[0, 1].legend(frameon=False, fontsize=7)
    axes[1, 0].plot(millions, curve[:, 3])
    axes[1, 0].set_ylabel("learning rate")
    axes[1, 1].plot(millions, curve[:, 8] / 1e3, lw=0.8)
    axes[1, 1].set_ylabel("thousand tokens a second")
    for axis in axes[1]:
        axis.set_xlabel("million tokens")
    figure.tight_layout()
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


def card(
    run: dict, corpora: dict, dense: dict, quantised: dict, samples: list[dict], device: str, verified: str, size: int
) -> str:
    parameters, calls = run["sizes"]["parameters"], run["calls"]
    trunk = shape.TRUNK
    loads = np.array(run["loads"]) * trunk["num_experts"]
    tokens = {group: f"{count / 1e6:.1f}" for group, count in run["sizes"]["tokens"].items()}
    unique = sum(run["sizes"]["tokens"].values())
    seen = {group: count * shape.GROUP_WEIGHTS[group] for group, count in run["sizes"]["tokens"].items()}
    passes = run["tokens"] / sum(seen.values())
    speeds = [row[8] for row in run["curve"]]
    both = {**dense["texts"], "**all**": dense["all"]}
    ours = {**quantised["texts"], "**all**": quantised["all"]}
    cost = dense["all"]
    return f"""# tiny-hybrid

A language model of the Qwen3.5/3.6 MoE hybrid architecture (`model_type` qwen3_5_moe), small enough for a repository and a CPU, with the real head
geometry. It was trained from nothing for labkit on public-domain and permissive text. It is a laboratory animal: every mechanism of the large models is in it and its
outputs are English, but it knows next to nothing.

## Shape

{
        table(
            ["part", "value"],
            [
                ["parameters, trunk", f"{parameters['trunk']:,} (input and output matrix tied)"],
                ["parameters, MTP head", f"{parameters['mtp']:,}"],
                [
                    "hidden size, layers, vocabulary",
                    f"{trunk['hidden_size']}, {trunk['num_hidden_layers']}, {trunk['vocab_size']}",
                ],
                ["layer pattern", "three Gated DeltaNet layers, then one of full attention, twice"],
                [
                    "Gated DeltaNet",
                    f"{trunk['linear_num_key_heads']} key and {trunk['linear_num_value_heads']} value heads of 128 x 128, convolution of 4",
                ],
                [
                    "full attention",
                    f"{trunk['num_attention_heads']} query heads of 256 over {trunk['num_key_value_heads']} KV head, output gate, rotary on a quarter (theta 1e7)",
                ],
                [
                    "experts",
                    f"{trunk['num_experts']} of {trunk['moe_intermediate_size']}, top {trunk['num_experts_per_tok']}, weights renormalised; one shared expert of {trunk['shared_expert_intermediate_size']} with a gate",
                ],
                [
                    "trained context",
                    f"{calls[0]['length']} tokens, then {calls[-1]['length']}; longer contexts run but were never trained",
                ],
                [
                    "file",
                    f"{size:,} bytes; affine 4 bit, groups of 64, bf16 scales; routers and shared-expert gates 8 bit",
                ],
            ],
        )
    }

`model.safetensors` loads in stock `mlx_lm.load`. Beside the trunk it holds a next-next-token head of Qwen's form under `mtp.*`, which mlx-lm leaves out. The head
takes the trunk's final-norm output at position i and the embedding of token i+1 and predicts token i+2 through the tied matrix; its norms, like all in this file,
are stored as 1 + w.

The tokenizer is a byte-level BPE of 8192 entries with Qwen's special tokens; the chat template has Qwen's form (thinking on or off, tools, tool answers).

## Quality

Held-out bits per byte: windows of {
        dense["window"]
    } tokens, fp32. "Dense" are the trained bf16 weights, "4 bit" the shipped ones, both by transformers' torch code;
"MLX" is this file by stock mlx-lm with fp32 activations.

{
        table(
            ["text", "bytes", "dense", "4 bit", "MLX"],
            [
                [
                    name,
                    both[name]["bytes"],
                    f"{both[name]['against_bits_per_byte']:.4f}",
                    f"{both[name]['bits_per_byte']:.4f}",
                    f"{ours[name]['bits_per_byte']:.4f}" if name in ours else "-",
                ]
                for name in both
            ],
        )
    }

Cost of quantisation: {cost["bits_per_byte"] - cost["against_bits_per_byte"]:+.4f} bits per byte, top-1 agreement {
        cost["top1_agreement"]:.2%}, mean KL {cost["mean_kl_nats"]:.4f} nats over {cost["tokens"]:,} positions.
Oracle: {verified}

![curves](training.svg)

Router load on the last training batches, 1 = even (least loaded expert {loads.min():.2f}, most {
        loads.max():.2f}, over all layers):

![router load](router_load.svg)

## Samples

Greedy, from the shipped file.

{samples_text(samples)}

## Training

{
        table(
            ["", ""],
            [
                ["device", device],
                [
                    "steps, tokens",
                    f"{run['step']:,} steps, {run['tokens'] / 1e6:.0f} M tokens: {passes:.1f} passes over {unique / 1e6:.1f} M tokens of text, weighted by group",
                ],
                [
                    "time",
                    f"{run['elapsed']:.0f} s of training in {len(calls)} calls, median {np.median(speeds) / 1e3:.0f} thousand tokens a second",
                ],
                [
                    "batches",
                    "; ".join(f"{call['rows']} x {call['length']} from step {call['from_step']}" for call in calls),
                ],
                [
                    "optimiser",
                    "Muon (momentum 0.95, five Newton-Schulz steps, per head) for matrices, AdamW (0.9, 0.95) for the rest; weight decay 0.1",
                ],
                [
                    "schedule",
                    f"peak {train.PEAK_LR:g}, {train.WARMUP_STEPS} steps of warm-up, constant to {train.DECAY_FROM:.0%} of the time, linear to {train.FINAL_LR:.0%} of the peak",
                ],
                [
                    "losses",
                    f"next token + {train.MTP_WEIGHT} x MTP on every {train.MTP_ROWS}th row + {train.BALANCE_WEIGHT:g} x load balance",
                ],
                ["precision", "bf16 weights and activations, fp32 masters"],
                ["seed", train.SEED],
            ],
        )
    }

The trunk is transformers' own `Qwen3_5MoeForCausalLM`; on the GPU its layers run in the faster forms of `recipes/tiny_hybrid/fast.py`. The recipe is reproducible from
`recipes/tiny_hybrid` (bit-identical weights are not promised: the schedule follows the clock).

## Text

{
        table(
            ["source", "licence", "group", "M characters"],
            [
                [name, source["licence"], source["group"], f"{source['characters'] / 1e6:.2f}"]
                for name, source in corpora["sources"].items()
            ],
        )
    }

Million tokens by group: {
        ", ".join(f"{group} {count} (weight {shape.GROUP_WEIGHTS[group]:g})" for group, count in tokens.items())
    }.

Held-out texts (`data/heldout/DATA.md`) were removed by document, with the same Bible books in both translations and the commentaries, and every training paragraph that
shares 13 consecutive words with them was dropped. What overlap remains, as the share of a held-out text's runs of n words that occur anywhere in training:

{
        table(
            ["text", "13 words", "8 words"],
            [
                [name, f"{corpora['heldout_overlap']['13'][name]:.2%}", f"{corpora['heldout_overlap']['8'][name]:.2%}"]
                for name in corpora["heldout_overlap"]["13"]
            ],
        )
    }

Chat examples were made by `recipes/tiny_hybrid/chat.py` from WordNet, the King James Version and templates. No copyleft text was used.
WordNet 3.0 is copyright 2006 by Princeton University; Python and its documentation are copyright of the Python Software Foundation.

## Limits

It repeats itself, invents facts, cannot reason, and copies phrases of its sources (some texts were seen more than ten times). English only. Four of {
        trunk["num_experts"]
    } tiny experts and {trunk["hidden_size"]} hidden
units say nothing about the quality of a large model; a change that costs quality here may cost more or less there.

## Licence

Apache-2.0, as labkit. The sources' licences are listed above.
"""


def samples_text(samples: list[dict]) -> str:
    return "\n\n".join(f"> **{sample['prompt'].strip()}**{sample['text']}".replace("\n", "\n> ") for sample in samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("curves", "corpora", "dense", "quantised", "samples", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--verified", required=True, help="what the oracle check found, one sentence")
    arguments = parser.parse_args()
    read = lambda path: json.loads(path.read_text())
    run = read(arguments.curves)
    plot_curves(run, arguments.out / "training.svg")
    plot_loads(run, arguments.out / "router_load.svg")
    size = (arguments.out / "model.safetensors").stat().st_size
    evaluations = [read(path) for path in (arguments.corpora, arguments.dense, arguments.quantised, arguments.samples)]
    (arguments.out / "MODEL_CARD.md").write_text(card(run, *evaluations, arguments.device, arguments.verified, size))


if __name__ == "__main__":
    main()
