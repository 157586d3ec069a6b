"""Check that the shipped model in MLX and its exported weights in transformers' torch code give the same logits on
real text.

    python -m recipes.tiny_hybrid.verify_export logits --model data/models/tiny-hybrid --out /tmp/mlx.npz
    python -m recipes.tiny_hybrid.verify_export compare --transformers /tmp/exported --logits /tmp/mlx.npz

Two commands, because MLX and torch may live in different environments. `compare` fails above 5e-4 (logits, fp32) or
KL 1e-6.
"""

import argparse
from pathlib import Path

import numpy as np

LOGITS, KL = 5e-4, 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("logits")
    write.add_argument("--model", type=Path, default=Path("data/models/tiny-hybrid"))
    write.add_argument("--heldout", type=Path, default=Path("data/heldout"))
    write.add_argument("--tokens", type=int, default=256, help="tokens of each held-out text")
    write.add_argument("--out", type=Path, required=True)
    check = commands.add_parser("compare")
    check.add_argument("--transformers", type=Path, required=True)
    check.add_argument("--logits", type=Path, required=True)
    check.add_argument("--out", type=Path, help="write the sentence here too, for the card")
    arguments = parser.parse_args()
    write_logits(arguments) if arguments.command == "logits" else compare(arguments)


def write_logits(arguments: argparse.Namespace) -> None:
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.utils import load_model
    from tokenizers import Tokenizer

    mx.set_default_device(mx.cpu)
    model, _ = load_model(arguments.model)
    model.update(
        tree_map(lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p, model.parameters())
    )
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    texts = [path.read_text() for path in sorted(arguments.heldout.glob("*.txt"))]
    ids = np.array([tokenizer.encode(text).ids[: arguments.tokens] for text in texts])
    logits = np.concatenate([np.array(model(mx.array(row[None]))) for row in ids])
    np.savez(arguments.out, ids=ids, logits=logits)


def compare(arguments: argparse.Namespace) -> None:
    import torch
    from transformers import Qwen3_5MoeForCausalLM

    saved = np.load(arguments.logits)
    model = Qwen3_5MoeForCausalLM.from_pretrained(arguments.transformers, dtype=torch.float32).eval()
    with torch.no_grad():
        ours = torch.from_numpy(saved["logits"])
        theirs = model(input_ids=torch.from_numpy(saved["ids"]).long(), use_cache=False).logits
        first, second = theirs.log_softmax(-1), ours.log_softmax(-1)
        kl = (first.exp() * (first - second)).sum(-1).max().item()
    difference = (ours - theirs).abs().max().item()
    same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item()
    said = (
        f"{ours.shape[0]} x {ours.shape[1]} positions, largest logit difference {difference:.1e}, "
        f"largest KL {kl:.1e}, top-1 agreement {same:.4%}"
    )
    print(said)
    if arguments.out:
        arguments.out.write_text(said + "\n")
    if difference > LOGITS or kl > KL:
        raise SystemExit(f"above the limits {LOGITS:g} (logits) or {KL:g} (KL)")


if __name__ == "__main__":
    main()
