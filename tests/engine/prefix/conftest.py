"""A model without weights, whose caches say which tokens they have seen: a wrong state is seen at once."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from labkit.caches import Cache, Contiguous, Recurrent, Rotating
from labkit.engine.prefix import PrefixStore

WIDTH = 8
WINDOW = 12
HEADS, DIM = 2, 4


class Witness:
    """Layers of the given kinds. Column t of every layer, and every state, is made from the tokens up to there.

    Attributes:
        model, fingerprint, dtype, layouts: what a store asks of a loaded model.
    """

    def __init__(self, *kinds: str, fingerprint: str = "witness"):
        self.kinds, self.fingerprint, self.model = kinds, fingerprint, self
        self.dtype, self.layouts = mx.float32, [None] * len(kinds)
        self.layouts = [cache.layout for cache in self.after([1, 2])]

    def make_caches(self) -> list[Cache]:
        made = {
            "contiguous": lambda layout: Contiguous(layout),
            "rotating": lambda layout: Rotating(WINDOW, 0, layout),
            "recurrent": lambda layout: Recurrent(2, layout),
        }
        return [made[kind](layout) for kind, layout in zip(self.kinds, self.layouts, strict=True)]

    def after(self, tokens: Sequence[int], *, chunk: int = WIDTH) -> list[Cache]:
        """Caches that have taken in `tokens`, chunk by chunk."""
        caches = self.make_caches()
        for start in range(0, len(tokens), chunk):
            self.extend(caches, tokens, start, min(start + chunk, len(tokens)))
        return caches

    def extend(self, caches: Sequence[Cache], tokens: Sequence[int], start: int, end: int) -> None:
        """Tokens start to end."""
        prints = list(fingerprints(tokens[:end]))
        for layer, cache in enumerate(caches):
            if isinstance(cache, Recurrent):
                cache[0] = mx.array(np.full((1, 3, DIM), prints[-1] + layer, np.float32))
                cache[1] = mx.array(np.full((1, HEADS, DIM, DIM), prints[-1] - layer, np.float32))
            else:
                columns = np.array(prints[start:end], np.float32)[None, None, :, None] + layer
                columns = np.broadcast_to(columns, (1, HEADS, end - start, DIM))
                cache.update_and_fetch(mx.array(columns), mx.array(-columns))
        mx.eval([cache.state for cache in caches])

    def same(self, caches: Sequence[Cache], tokens: Sequence[int], *, chunk: int = WIDTH) -> bool:
        """Whether the caches are, bit for bit, what these tokens leave behind."""
        wanted = self.after(tokens, chunk=chunk)
        return all(
            type(a) is type(b) and _same(a.dump(), b.dump()) and a.layout == b.layout
            for a, b in zip(caches, wanted, strict=True)
        )


def fingerprints(tokens: Sequence[int]) -> Iterator[int]:
    """For each token a number that depends on it and on all before it, exact as a float32."""
    crc = 0
    for token in tokens:
        crc = zlib.crc32(struct.pack("<i", token), crc)
        yield crc % (1 << 22)


def _same(a: tuple[dict, dict], b: tuple[dict, dict]) -> bool:
    (arrays, scalars), (others, others_scalars) = a, b
    return (
        scalars == others_scalars
        and arrays.keys() == others.keys()
        and all(mx.array_equal(arrays[name], others[name]) for name in arrays)
    )


def commit_all(store: PrefixStore, witness: Witness, tokens: Sequence[int], **options: Any) -> list[Any]:
    """Compute a prompt on the store's grid and commit at every boundary, as an engine does."""
    caches, results = witness.make_caches(), []
    for start in range(0, len(tokens), store.grid):
        end = min(start + store.grid, len(tokens))
        witness.extend(caches, tokens, start, end)
        if end % store.grid == 0:
            results.append(store.commit(tokens[:end], caches, **options))
    return results


KINDS = {
    "full": ("contiguous", "contiguous"),
    "hybrid": ("recurrent", "contiguous"),
    "sliding": ("rotating", "contiguous", "rotating"),
    "rings": ("rotating",),
    "states": ("recurrent", "recurrent"),
    "all": ("contiguous", "rotating", "recurrent"),
}


@pytest.fixture(params=KINDS)
def witness(request: pytest.FixtureRequest) -> Witness:
    """A model of every mixture of kinds."""
    return Witness(*KINDS[request.param])


@pytest.fixture
def hybrid() -> Witness:
    """One layer that is cut into blocks, one that is not."""
    return Witness(*KINDS["hybrid"])


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Any]:
    """`open_store(witness, name=..., **options)`: a store in a folder of the test's own, closed at its end."""
    opened: list[PrefixStore] = []

    def make(loaded: Any, name: str | None = "store", **options: Any) -> PrefixStore:
        options = {"width": WIDTH, "keep_free_bytes": 0} | options
        opened.append(PrefixStore(loaded, None if name is None else tmp_path / name, **options))
        return opened[-1]

    yield make
    for store in opened:
        store.close(5.0)


PROMPT = [(7 * i + 3) % 251 for i in range(45)]  # five blocks and five tokens
ROW = [*PROMPT, *[(11 * i) % 200 for i in range(30)]]  # a prompt, and what was decoded after it


def restored(store: PrefixStore, witness: Witness, tokens, **options) -> int:
    """How many tokens come back; what does must be right."""
    lease = store.lookup(tokens, **options)
    if lease is None:
        return 0
    with lease:
        assert witness.same(lease.restore(), tokens[: lease.tokens])
        return lease.tokens


def decoded(witness: Witness) -> list:
    """A row in the middle of decoding: its ring has turned."""
    caches = witness.after(PROMPT)
    for position in range(45, 75):
        witness.extend(caches, ROW, position, position + 1)
    return caches


def identical(a: list, b: list) -> bool:
    return all(
        x.dump()[1] == y.dump()[1] and all(mx.array_equal(x.dump()[0][n], y.dump()[0][n]) for n in y.dump()[0])
        for x, y in zip(a, b, strict=True)
    )


def leaves(cache):
    return [array for _, array in tree_flatten(cache.state) if isinstance(array, mx.array)]


def address(array):
    return np.array(array.view(mx.uint8), copy=False).ctypes.data
