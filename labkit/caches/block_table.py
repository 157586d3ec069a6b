"""A row's blocks of a pool, in the order of its tokens, and the keys by which rows with equal prompts share them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from labkit.caches.block_pool import NULL, BlockPool
from labkit.caches.extra_keys import ExtraKeys, holding, normalised


class Table:
    """One row's blocks, in the order of its tokens: block i holds tokens i * block_tokens onwards.

    Attributes:
        blocks: their numbers; `NULL` where the tokens left the window.
        keys: of the blocks of the row's prompt, as far as they are known; what is written there is shared by key.
        promised: blocks that the row may come to need in all.
    """

    def __init__(self, pool: BlockPool, keys: Sequence[bytes] = (), promised: int = 0):
        self.pool, self.keys, self.promised = pool, list(keys), promised
        self.blocks: list[int] = []
        pool._tables.add(self)

    @property
    def tokens(self) -> int:
        """Tokens in finished blocks, those that left the window included."""
        return len(self.blocks) * self.pool.block_tokens

    @property
    def outstanding(self) -> int:
        """Blocks that the row was promised and has not taken."""
        return max(0, self.promised - sum(block != NULL for block in self.blocks))

    def fork(self) -> Table:
        """The same tokens for another row: every block is shared, none is copied."""
        twin = Table(self.pool, self.keys, self.promised)
        twin.blocks = [self.pool.share(block) for block in self.blocks]
        return twin

    def new_blocks_needed(self, count: int, planned: set[bytes]) -> int:
        """How many of the next `count` blocks must be allocated: those that no row has, nor another row in `planned`
        (the keys of blocks about to be written) will."""
        needed = 0
        for key in self._next_keys(count):
            if key is None:
                needed += 1
            elif key not in planned and self.pool.find(key) is None:
                planned.add(key)
                needed += 1
        return needed

    def grow(self, count: int) -> list[int]:
        """Take the next `count` blocks, or PoolExhausted and none; returns, for each, the block to write or `NULL`
        where it is written already."""
        self.pool.require(self.new_blocks_needed(count, set()))
        to_write = []
        for key in self._next_keys(count):
            block = None if key is None else self.pool.find(key)
            if block is not None:
                self.blocks.append(self.pool.share(block))
                to_write.append(NULL)
                continue
            (block,) = self.pool.allocate(1)
            self.blocks.append(block)
            to_write.append(block)
            if key is not None:
                self.pool.publish(key, block)
        return to_write

    def take_shared(self, count: int, null: int = 0) -> None:
        """Begin with the blocks of the first `count` keys, which are all in use but for the first `null`, whose tokens
        no query will see."""
        for i, key in enumerate(self.keys[:count]):
            self.blocks.append(NULL if i < null else self.pool.share(self.pool.find(key)))

    def begin_at(self, count: int) -> None:
        """Begin behind `count` blocks of tokens that are not there, with keys for none."""
        self.blocks, self.keys = [NULL] * count, []

    def cut(self, count: int) -> None:
        """Give back all but the first `count` blocks. Keys of what will be written anew are forgotten."""
        dropped = self.blocks[count:]
        del self.blocks[count:]
        del self.keys[count:]
        self.pool.give_back(dropped)

    def drop_first(self, count: int) -> bool:
        """Give back the first `count` blocks: their tokens left the window. Whether there were any."""
        count = min(count, len(self.blocks))
        if count == 0 or self.blocks[count - 1] == NULL:
            return False
        old = self.blocks[:count]
        self.blocks[:count] = [NULL] * count
        self.pool.give_back(old)
        return True

    def release(self) -> None:
        """Give everything back, promises too. May be called twice."""
        self.promised = 0
        self.cut(0)

    def _next_keys(self, count: int) -> list[bytes | None]:
        start = len(self.blocks)
        known = self.keys[start : start + count]
        return [*known, *[None] * (count - len(known))]

    def __del__(self):
        if self.blocks:
            self.pool._dropped.append(self.blocks)


def block_keys(tokens: Sequence[int], block_tokens: int, extra: ExtraKeys = ()) -> list[bytes]:
    """A key for each whole block of a prompt: sha256 over the key before, the block's tokens and the extra keys that
    hold in it, so that equal keys mean equal blocks from the first on."""
    keys, before, beside = [], hashlib.sha256(b"labkit block %d" % block_tokens).digest(), normalised(extra)
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        numbers = b"".join(
            int(token).to_bytes(8, "little", signed=True) for token in tokens[start : start + block_tokens]
        )
        held = [key.encode() for key in holding(beside, start + block_tokens)]
        framed = b"".join(len(key).to_bytes(8, "little") + key for key in held)
        before = hashlib.sha256(before + numbers + framed).digest()
        keys.append(before)
    return keys
