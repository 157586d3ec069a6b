"""How one engine names and labels its records: the chain of a prompt, and what a record says of itself."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.caches.extra_keys import ExtraKeys, holding, normalised
from labkit.engine.prefix import hashing
from labkit.engine.prefix.grid import Grid
from labkit.engine.prefix.record import Part, Record, Tensor, name_of


class Chains:
    """Names under one root.

    Args:
        root: what `hashing.root` gave.
        model: the weights' fingerprint, for whoever looks into a file.
        grid: the blocks.
        by_token: whether the model has layers that are cut into blocks.
    """

    def __init__(self, root: str, model: str, grid: Grid, *, by_token: bool):
        self.root, self._grid, self._by_token = root, grid, by_token
        self._about = {"root": root, "model": model, "width": str(grid.width)}

    def keys(self, tokens: Sequence[int], extra: ExtraKeys, chunks: Sequence[int]) -> list[str]:
        """The whole blocks of `tokens`.

        Args:
            chunks: the widths that they were computed in, in order; empty for one chunk a block.
        """
        return hashing.chain(self.root, tokens, self._grid.width, extra, self._grid.by_block(chunks))

    def tail_key(self, tokens: Sequence[int], extra: ExtraKeys, keys: Sequence[str], chunks: Sequence[int]) -> str:
        """What is behind the whole blocks `keys` of `tokens`."""
        rest, cut = tokens[len(keys) * self._grid.width :], self._grid.rest(chunks)
        held = holding(normalised(extra), len(tokens))
        return hashing.block(keys[-1] if keys else self.root, rest, held, () if cut == (len(rest),) else cut)

    def columns(self, keys: Sequence[str]) -> list[str]:
        """The records that by-token layers need of these blocks."""
        return [name_of(key, "columns") for key in keys] if self._by_token else []

    def record(
        self, keys: Sequence[str], index: int, part: Part, tensors: dict[str, Tensor], about: dict[str, str]
    ) -> Record:
        """A record of block `index` of a chain, which says whose it is."""
        own = {
            **self._about,
            "key": keys[index],
            "part": part,
            "parent": keys[index - 1] if index else self.root,
            "depth": str(index + 1),
            "bytes": str(sum(tensor.nbytes for tensor in tensors.values())),
        }
        return Record(tensors, own | about)

    def expected(self, name: str) -> dict[str, str]:
        """What the record of this name must say of itself."""
        key, _, part = name.partition(".")
        return {"root": self.root, "key": key, "part": part}
