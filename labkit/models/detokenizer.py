"""Incremental detokenisation: text as soon as it is certain, and never half a character."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache

_REPLACEMENT = "\ufffd"


class Detokenizer(ABC):
    """Takes tokens one by one; the pieces it returns, joined, are what decoding all tokens at once gives."""

    @abstractmethod
    def add(self, token: int) -> str:
        """The text that `token` completes; "" while a character is still incomplete."""

    @abstractmethod
    def finish(self) -> str:
        """The rest of the text: incomplete characters as U+FFFD."""


class ByteLevelDetokenizer(Detokenizer):
    """For byte-level BPE, where each token stands for bytes: exact, in time linear in the text."""

    def __init__(self, piece: Callable[[int], bytes]):
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(self._piece(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)

    @staticmethod
    def piece_bytes(piece: str | None) -> bytes:
        """A vocabulary entry -> its bytes. Added tokens that are not written in the byte alphabet are plain text."""
        table = _byte_alphabet()
        if piece is None:
            return b""
        if all(char in table for char in piece):
            return bytes(table[char] for char in piece)
        return piece.encode("utf-8")


class WindowDetokenizer(Detokenizer):
    """For any tokenizer: decodes a short window twice and returns the difference.

    The window's first token is one that was shown already, because a decoder may treat the first token of a text
    differently (SentencePiece drops its space).
    """

    _HOLD = 8  # tokens after which bytes that form no character are shown as they are

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._tokens: list[int] = []
        self._shown = self._start = 0

    def add(self, token: int) -> str:
        self._tokens.append(token)
        text = self._decode(self._tokens[self._start :])
        if text.endswith(_REPLACEMENT) and len(self._tokens) - self._shown < self._HOLD:
            return ""
        return self._take(text)

    def finish(self) -> str:
        return self._take(self._decode(self._tokens[self._start :])) if self._shown < len(self._tokens) else ""

    def _take(self, text: str) -> str:
        known = self._decode(self._tokens[self._start : self._shown]) if self._shown > self._start else ""
        self._start, self._shown = self._shown, len(self._tokens)
        return text[len(known) :]


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}
