"""The hash chain: a block's name says everything that its bytes depend on.

    root  = H(domain | model | numerics | layout of every cache | chunk width)
    block = H(parent | tokens | extra keys | how its tokens were cut into chunks)

Every field goes in behind its length, so that no two lists of fields can read alike. Equal names mean equal bytes:
another model, another layout, another chunk width, an image in front or one token that differs give another name, and
with it a miss.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from labkit.caches.extra_keys import ExtraKeys, holding, normalised

DOMAIN = b"labkit prefix chain 1"


def digest(*fields: bytes) -> str:
    """sha256 (hex) over length-framed fields."""
    state = hashlib.sha256()
    for field in fields:
        state.update(struct.pack("<Q", len(field)))
        state.update(field)
    return state.hexdigest()


def root(model: str, numerics: str, layouts: Sequence[str], width: int) -> str:
    """The name that stands before the first block.

    Args:
        model: the weights' fingerprint.
        numerics: whose arithmetic made the bytes (graph, device, library): others round differently.
        layouts: every cache's layout fingerprint, in layer order.
        width: tokens of a block.
    """
    return digest(
        DOMAIN, model.encode(), numerics.encode(), digest(*(s.encode() for s in layouts)).encode(), _ints([width])
    )


def block(parent: str, tokens: Sequence[int], extra: Sequence[str], chunks: Sequence[int] = ()) -> str:
    """The name of the block of `tokens` behind `parent`.

    Args:
        extra: the keys that hold somewhere in it.
        chunks: the widths it was computed in, where that was not one chunk.
    """
    keys = digest(*(key.encode() for key in extra))
    return digest(parent.encode(), _ints(tokens), keys.encode(), _ints(chunks))


def chain(
    start: str,
    tokens: Sequence[int],
    width: int,
    extra: ExtraKeys = (),
    chunks: Sequence[Sequence[int]] = (),
) -> list[str]:
    """The names of all whole blocks of `tokens`.

    Args:
        chunks: for the first blocks, the chunk widths they were computed in; blocks beyond are one chunk each.

    Raises:
        ValueError: extra keys of another form, or tokens that are no 32-bit integers.
    """
    keys, names = normalised(extra), []
    for index in range(len(tokens) // width):
        begin, end = index * width, (index + 1) * width
        cut = tuple(chunks[index]) if index < len(chunks) else ()
        start = block(start, tokens[begin:end], holding(keys, end), () if cut == (width,) else cut)
        names.append(start)
    return names


def _ints(values: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(values)}i", *values)
    except struct.error as error:
        raise ValueError(f"tokens must be 32-bit integers: {error}") from error
