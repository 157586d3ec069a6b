"""What the states of a prompt depend on besides its tokens: an image's digest, an adapter's name."""

from __future__ import annotations

from collections.abc import Sequence

ExtraKeys = Sequence[str | tuple[int, str]]
"""A string counts from the first token on, a pair (start, string) from token `start` on."""


def normalised(extra: ExtraKeys) -> tuple[tuple[int, str], ...]:
    """Extra keys as sorted pairs (start, key).

    Raises:
        ValueError: a key that is neither a string nor a pair (start, string), or a string that is not valid Unicode.
    """
    try:
        pairs = [(0, key) if isinstance(key, str) else key for key in ([extra] if isinstance(extra, str) else extra)]
    except TypeError as error:
        raise ValueError(f"extra keys are a sequence, not {extra!r}") from error
    for pair in pairs:
        right = isinstance(pair, tuple) and len(pair) == 2 and type(pair[0]) is int and isinstance(pair[1], str)
        if not right or pair[0] < 0:
            raise ValueError(f"an extra key is a string or a pair (first token, string), not {pair!r}")
        try:
            pair[1].encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"an extra key is not valid Unicode: {pair[1]!r}") from error
    return tuple(sorted(pairs))


def holding(keys: Sequence[tuple[int, str]], end: int) -> list[str]:
    """The normalised keys that tokens up to `end` depend on: those that began before. Where a key begins is part of
    what it says."""
    return [f"{start}:{key}" for start, key in keys if start < end]
