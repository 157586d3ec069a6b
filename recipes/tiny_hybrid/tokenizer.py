"""Train the 8k byte-level BPE tokenizer with Qwen's special tokens and write it in the form mlx-lm and transformers
load.

python -m recipes.tiny_hybrid.tokenizer --corpora .corpora --out data/models/tiny-hybrid
"""

import argparse
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import shape
from .packed import documents

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# GPT-4's split, with single digits as in Qwen
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SHARE = {"code": 0.1, "manual": 0.15, "wordnet": 0.3, "commentary": 0.3}  # the rest is used whole


def sample(corpora: Path, seed: int = 0) -> Iterator[str]:
    rng = random.Random(seed)
    for group in shape.GROUP_WEIGHTS:
        for text in documents(corpora, group):
            if rng.random() < SHARE.get(group, 1.0):
                yield text


def new_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train(texts: Iterator[str]) -> Tokenizer:
    """A BPE of exactly `shape.VOCABULARY` entries; special tokens take the first ids."""
    tokenizer = new_tokenizer()
    specials = [AddedToken(token, special=True, normalized=False) for token in CONTROL]
    specials += [AddedToken(token, special=False, normalized=False) for token in MARKERS]
    trainer = trainers.BpeTrainer(
        vocab_size=shape.VOCABULARY,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # The trainer marks all its extra tokens as special; the markers must survive decoding with skip_special_tokens.
    settings = json.loads(tokenizer.to_str())
    for token in settings["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    return Tokenizer.from_str(json.dumps(settings))


def save(tokenizer: Tokenizer, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    shutil.copy(Path(__file__).parent / "chat_template.jinja", out / "chat_template.jinja")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.MAX_POSITIONS,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", type=Path, default=Path(".corpora"))
    parser.add_argument("--out", type=Path, default=Path("data/models/tiny-hybrid"))
    arguments = parser.parse_args()
    save(train(sample(arguments.corpora)), arguments.out)


if __name__ == "__main__":
    main()
