"""Text to tokens and back: a wrapper around the checkpoint's Hugging Face tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from labkit.models import chat
from labkit.models.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer


class Tokenizer:
    """The tokenizer of one model.

    Attributes:
        hf: mlx-lm's wrapper around the Hugging Face tokenizer, for what is not here.
        eos_token_ids: tokens that end a generation.
        vocab_size: tokens, added ones included; the model's logits may have more columns.
        base_vocab_size: tokens without added ones, which alone a model need not have a row for.
    """

    def __init__(self, hf: Any):
        self.hf = hf
        self.eos_token_ids: frozenset[int] = frozenset(hf.eos_token_ids)
        self.vocab_size = len(hf)
        self.base_vocab_size: int = hf.vocab_size
        self._byte_level = _decodes_bytes(hf)
        self._pieces: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special_tokens: bool | None = None) -> list[int]:
        """Text -> token ids. Special tokens (a BOS) are added unless the text begins with one already."""
        _check_text(text)
        if add_special_tokens is None:
            bos = self.hf.bos_token
            add_special_tokens = bos is None or not text.startswith(bos)
        return list(self.hf.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, tokens: Iterable[int]) -> str:
        """Token ids -> text, special tokens shown as text."""
        return self.hf.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental detokenizer."""
        if self._byte_level:
            return ByteLevelDetokenizer(self._piece)
        return WindowDetokenizer(self.decode)

    def _piece(self, token: int) -> bytes:
        """The bytes of one token of a byte-level vocabulary."""
        if token not in self._pieces:
            self._pieces[token] = ByteLevelDetokenizer.piece_bytes(self.hf.convert_ids_to_tokens(token))
        return self._pieces[token]

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work."""
        return self.hf.has_chat_template

    def render_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, thinking: bool = True
    ) -> chat.RenderedChat:
        """A conversation -> the prompt for the assistant's next turn, with the span of every message in it.

        Raises:
            ValueError: no chat template, no messages, or messages that the template refuses.
        """
        if not isinstance(messages, list):
            raise ValueError(f"messages must be a list, not {messages!r}")
        for message in messages:
            if isinstance(message, dict) and isinstance(message.get("content"), str):
                _check_text(message["content"])
        return chat.render(self, messages, tools, thinking)


def _check_text(text: str) -> None:
    """Raises:
    ValueError: a string that is no text: half a surrogate pair, as Python makes of bytes that are not UTF-8.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is not valid Unicode at character {error.start}: give it as UTF-8") from error


def _decodes_bytes(hf: Any) -> bool:
    backend = getattr(hf, "backend_tokenizer", None)
    if backend is None:
        return False
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    return decoder.get("type") == "ByteLevel"
