"""The tokenizer inside a GGUF file -> tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labkit.models.files import LoadError

_CONTROL, _BYTE = 3, 6  # ggml's token types
_SPACE = "\u2581"
# Regular expressions that split text before byte-level BPE, by the name llama.cpp gives them.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def write_tokenizer(source: Path, metadata: dict[str, Any], folder: Path) -> None:
    """Write the tokenizer of `source` into `folder`.

    Raises:
        LoadError: no tokenizer, or one of a kind that is not read.
    """
    from tokenizers import AddedToken

    _check(source, metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = _byte_level(source, metadata, tokens)
    elif model == "llama":
        tokenizer = _sentencepiece(metadata, tokens)
    else:
        raise LoadError(f"{source} has a tokenizer of the kind {model!r}: 'gpt2' and 'llama' are read")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get("llama.context_length", 2048),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            config[f"{name}_token"] = tokens[index]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def _check(source: Path, metadata: dict[str, Any]) -> None:
    """Raises:
    LoadError: no tokenizer, or one whose lists are not what they must be.
    """

    def listed(name: str, kind: type, length: int | None = None) -> bool:
        values = metadata.get(f"tokenizer.ggml.{name}", [])
        return isinstance(values, list) and length in (None, len(values)) and all(type(v) is kind for v in values)

    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise LoadError(f"{source} holds no tokenizer: labkit needs one inside the file")
    if not listed("tokens", str):
        raise LoadError(f"{source}: tokenizer.ggml.tokens must be a list of strings")
    for name, kind in (("token_type", int), ("scores", float)):
        if metadata.get(f"tokenizer.ggml.{name}") and not listed(name, kind, len(tokens)):
            raise LoadError(f"{source}: tokenizer.ggml.{name} must be {len(tokens)} numbers, one a token")
    if not listed("merges", str) or not all(" " in merge for merge in metadata.get("tokenizer.ggml.merges", [])):
        raise LoadError(f"{source}: tokenizer.ggml.merges must be a list of pairs of tokens")
    for name in ("bos", "eos", "unknown", "padding"):
        index = metadata.get(f"tokenizer.ggml.{name}_token_id", 0)
        if type(index) is not int or not 0 <= index < len(tokens):
            raise LoadError(f"{source}: tokenizer.ggml.{name}_token_id is {index!r}, which is none of its tokens")


def _byte_level(source: Path, metadata: dict[str, Any], tokens: list[str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    split = metadata.get("tokenizer.ggml.pre", "default")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def by(pattern: str) -> Any:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_only])

    forms = {
        "default": whole,
        "gpt-2": whole,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole]),
        "llama-bpe": by(_LLAMA3),
        "qwen2": by(_QWEN2),
    }
    if split not in forms:
        raise LoadError(f"{source} splits text in the way {split!r}: {', '.join(sorted(forms))} are read")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split == "llama-bpe"))
    tokenizer.pre_tokenizer = forms[split]
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> Any:
    """SentencePiece's BPE: the merges follow from the pieces' scores, best first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: index for index, token in enumerate(tokens)}
    scores = metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    merges = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    ordered = [(left, right) for *_, left, right in sorted(merges)]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(vocab=vocabulary, merges=ordered, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    steps = [normalizers.Prepend(_SPACE)] if metadata.get("tokenizer.ggml.add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if steps else []),
        ]
    )
    return tokenizer
