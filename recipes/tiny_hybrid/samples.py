"""Continuations by the shipped model for the card: the same few prompts, greedy and at temperature 0.7.

python -m recipes.tiny_hybrid.samples --model data/models/tiny-hybrid --out samples.json
"""

import argparse
import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm import load

TOKENS = 40
TEXTS = (
    "Paul and Silas went through the city, and when they had come to",
    "The king of Israel said to his servants,",
    "The UNIQUE constraint is used to",
    "If the optional WHERE clause is omitted, then",
    "This module provides a class that",
    "sail (noun): a large piece of",
)
CHATS = (
    ("What is the capital of France?", False),
    ("What is 27 + 45?", True),
    ("What does 'harbor' mean?", False),
    ("Who are you?", False),
)
ENDS = (0, 2)


def continuation(model, ids: list[int], temperature: float) -> list[int]:
    cache, tokens, found = model.make_cache(), mx.array([ids]), []
    while len(found) < TOKENS:
        logits = model(tokens, cache=cache)[0, -1]
        chosen = mx.random.categorical(logits / temperature) if temperature else logits.argmax()
        token = chosen.item()
        if token in ENDS:
            break
        found.append(token)
        tokens = mx.array([[token]])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("data/models/tiny-hybrid"))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    mx.random.seed(0)
    model, tokenizer = load(str(arguments.model))
    widen = lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p
    model.update(tree_map(widen, model.parameters()))
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    samples = []
    for prompt in TEXTS:
        for temperature in (0.0, 0.7):
            text = tokenizer.decode(continuation(model, encode(prompt), temperature))
            samples.append({"prompt": prompt, "temperature": temperature, "text": text})
    for question, thinking in CHATS:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        text = tokenizer.decode(continuation(model, encode(prompt), 0.0))
        samples.append({"prompt": question, "temperature": 0.0, "chat": True, "thinking": thinking, "text": text})
    arguments.out.write_text(json.dumps(samples, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
