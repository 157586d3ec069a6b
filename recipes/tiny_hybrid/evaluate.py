"""Held-out bits per byte, and how often two models agree.

    python -m recipes.tiny_hybrid.evaluate                   # the shipped folder in MLX: fp32 activations
    python -m recipes.tiny_hybrid.evaluate --windows 1       # only the first window of each text
    python -m recipes.tiny_hybrid.evaluate --transformers /tmp/exported --against /tmp/dense     # in torch

Protocol: each text starts after <|endoftext|> and is cut into windows of WINDOW tokens; a window sees nothing of the
one before. Bits of all predicted tokens over the bytes of the text they cover. The torch form scores exported weights
with transformers' own code; with --against it also reports top-1 agreement and mean KL(against || model), which is the
cost of quantisation if the two are its two sides.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from . import shape

WINDOW = 2048
LogProbabilities = Callable[[np.ndarray], np.ndarray]  # tokens [L] -> log-probabilities [L, vocabulary] in nats
FIELDS = ("bits", "other", "bytes", "tokens", "same", "kl")


def windows(ids: list[int], length: int = WINDOW) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(inputs, targets) that cover each token of a text once as a target."""
    stream = np.array([shape.END_OF_TEXT, *ids])
    for start in range(0, stream.size - 1, length):
        window = stream[start : start + length + 1]
        yield window[:-1], window[1:]


def mlx_model(folder: Path) -> LogProbabilities:
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_map
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    model, _ = load_model(folder)
    widen = lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p
    model.update(tree_map(widen, model.parameters()))

    def score(tokens: np.ndarray) -> np.ndarray:
        cache, parts = model.make_cache(), []
        for start in range(0, tokens.size, 512):
            logits = model(mx.array(tokens[None, start : start + 512]), cache=cache)
            parts.append(np.array(nn.log_softmax(logits[0])))
        return np.concatenate(parts)

    return score


def torch_model(folder: Path) -> LogProbabilities:
    import torch
    from transformers import Qwen3_5MoeForCausalLM

    model = Qwen3_5MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def score(tokens: np.ndarray) -> np.ndarray:
        logits = model(input_ids=torch.from_numpy(tokens)[None].long(), use_cache=False).logits[0]
        return torch.log_softmax(logits.float(), dim=-1).numpy()

    return score


def measure(score: LogProbabilities, against: LogProbabilities | None, inputs: np.ndarray, targets: np.ndarray) -> dict:
    """Sums over one window, by FIELDS (all but the bytes)."""
    ours, rows = score(inputs), np.arange(targets.size)
    found = {"bits": -float(ours[rows, targets].sum()) / math.log(2), "tokens": targets.size}
    if against:
        theirs = against(inputs)
        found["other"] = -float(theirs[rows, targets].sum()) / math.log(2)
        found["same"] = int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        found["kl"] = float((np.exp(theirs) * (theirs - ours)).sum())
    return found


def evaluate(
    score: LogProbabilities,
    texts: dict[str, str],
    tokenizer: Tokenizer,
    against: LogProbabilities | None = None,
    count: int | None = None,
) -> dict:
    """Bits per byte of each text (of its first `count` windows) and of all; with `against` also agreement and KL."""
    report, totals, began = {}, dict.fromkeys(FIELDS, 0.0), time.monotonic()
    for name, text in texts.items():
        found, ids = dict.fromkeys(FIELDS, 0.0), tokenizer.encode(text).ids
        for number, (inputs, targets) in enumerate(windows(ids)):
            if number == count:
                break
            for key, value in measure(score, against, inputs, targets).items():
                found[key] += value
            rate = (totals["tokens"] + found["tokens"]) / (time.monotonic() - began)
            progress = f"{name}: {found['tokens']:.0f} of {len(ids)} tokens, {rate:.0f} a second"
            print(f"\r{progress}   ", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        found["bytes"] = len(tokenizer.decode(ids[: int(found["tokens"])], skip_special_tokens=False).encode())
        totals = {key: totals[key] + found[key] for key in FIELDS}
        report[name] = _summary(found, against is not None)
    return {"texts": report, "all": _summary(totals, against is not None), "window": WINDOW, "windows": count}


def _summary(found: dict, compared: bool) -> dict:
    result = {"bits_per_byte": found["bits"] / found["bytes"]}
    result |= {"bytes": int(found["bytes"]), "tokens": int(found["tokens"])}
    if compared:
        result["against_bits_per_byte"] = found["other"] / found["bytes"]
        result["top1_agreement"] = found["same"] / found["tokens"]
        result["mean_kl_nats"] = found["kl"] / found["tokens"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("data/models/tiny-hybrid"), help="tokenizer, and the model")
    parser.add_argument("--transformers", type=Path, help="score this exported folder with torch instead")
    parser.add_argument("--against", type=Path, help="a second exported folder to compare with")
    parser.add_argument("--heldout", type=Path, default=Path("data/heldout"))
    parser.add_argument("--windows", type=int, help="only the first windows of each text")
    parser.add_argument("--out", type=Path, help="write the report here as JSON")
    arguments = parser.parse_args()
    texts = {path.stem: path.read_text() for path in sorted(arguments.heldout.glob("*.txt"))}
    if not texts:
        parser.error(f"no .txt files in {arguments.heldout}")
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    score = torch_model(arguments.transformers) if arguments.transformers else mlx_model(arguments.model)
    against = torch_model(arguments.against) if arguments.against else None
    text = json.dumps(evaluate(score, texts, tokenizer, against, arguments.windows), indent=1)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
