"""The host's side of paged caches: which fixed blocks of tokens belong to whom. Plain numbers, no array.

A block holds `block_tokens` consecutive tokens of a row and is written once, whole; a row's newest, unfinished tokens
are its own and lie elsewhere (`pages.py`). So blocks are shared by counting references: by rows that were forked from
one another, and by rows whose prompts begin alike, since a block has a key, a hash over all tokens up to its end.
No row can write into what another one reads: taking tokens back out of a finished block copies what remains of
it (copy on write) and gives the block back.

A pool never overcommits: a request is admitted with a promise of the blocks that it may come to need, and what is
promised to one is not promised to another. So a row that runs never meets `PoolExhausted`, and nothing deadlocks.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.caches.block_table import Table

NULL = 0
"""The block without an owner, all zeros: what a table names where a row has no token (padding, tokens that left the
window)."""


class PoolExhausted(RuntimeError):
    """Blocks were asked for that are not there; nothing was changed. `record` has the numbers."""

    def __init__(self, needed: int, free: int, capacity: int, block_tokens: int):
        self.record = {
            "code": "pool_exhausted",
            "needed_blocks": needed,
            "free_blocks": free,
            "capacity_blocks": capacity,
            "block_tokens": block_tokens,
        }
        super().__init__(
            f"{needed} blocks of {block_tokens} tokens are needed and {free} of {capacity} are free: let rows leave, "
            "admit fewer, or give the pool more bytes"
        )


@dataclass(frozen=True)
class PoolStats:
    """One moment of a pool, in blocks unless said otherwise.

    Attributes:
        capacity: blocks that there may be. touched: those that were ever used at once, so far as memory goes.
        used: distinct blocks in use. referenced: entries of all tables (a shared block counts for each).
        shared: blocks in use by more than one table.
        promised: blocks that rows may still come to need.
        tables: rows. tokens: tokens of all rows in finished blocks, shared ones counted for each.
        block_tokens: tokens of a block.
    """

    capacity: int
    touched: int
    used: int
    referenced: int
    shared: int
    promised: int
    tables: int
    tokens: int
    block_tokens: int

    @property
    def free(self) -> int:
        """Blocks that nobody uses."""
        return self.capacity - self.used

    @property
    def idle(self) -> int:
        """Unused blocks that have memory: what fragmentation over time leaves."""
        return self.touched - self.used

    @property
    def saved(self) -> int:
        """Blocks that sharing saves."""
        return self.referenced - self.used

    def as_record(self) -> dict[str, int]:
        """Plain data, derived numbers included."""
        return asdict(self) | {"free": self.free, "idle": self.idle, "saved": self.saved}


class BlockPool:
    """Blocks 1 to `capacity`: free, or in use by as many tables as `references` says.

    Freed blocks are handed out again last in, first out, before blocks that were never used: the memory behind the
    pool grows only when it must.
    """

    def __init__(self, capacity: int, block_tokens: int):
        for name, number in (("capacity", capacity), ("block_tokens", block_tokens)):
            if type(number) is not int or number < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {number!r}")
        self.capacity, self.block_tokens = capacity, block_tokens
        self.references: dict[int, int] = {}
        self.touched = 0
        self._free: list[int] = []
        self._by_key: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._tables: weakref.WeakSet[Table] = weakref.WeakSet()
        # What tables held that were dropped without `release`: a destructor may run at any moment, in any thread, and
        # only puts its blocks here.
        self._dropped: deque[list[int]] = deque()

    # -- blocks --------------------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Distinct blocks in use."""
        self._collect()
        return len(self.references)

    @property
    def free(self) -> int:
        """Blocks that nobody uses."""
        return self.capacity - self.used

    def require(self, count: int) -> None:
        """Raises PoolExhausted unless `count` blocks are free."""
        if count > self.free:
            raise PoolExhausted(count, self.free, self.capacity, self.block_tokens)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, or PoolExhausted and none."""
        self.require(count)
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                self.touched += 1
                block = self.touched
            self.references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> int:
        """One more reference to a block in use."""
        if block != NULL:
            self.references[block] += 1
        return block

    def give_back(self, blocks: Sequence[int]) -> None:
        """One reference less to each; a block without any is free, and its key is forgotten."""
        self._collect()
        self._give_back(blocks)

    def _give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block == NULL:
                continue
            self.references[block] -= 1
            if self.references[block] == 0:
                del self.references[block]
                self._free.append(block)
                key = self._key_of.pop(block, None)
                if key is not None and self._by_key.get(key) == block:
                    del self._by_key[key]

    def _collect(self) -> None:
        while self._dropped:
            self._give_back(self._dropped.popleft())

    # -- sharing by content --------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> int | None:
        """The block in use that holds the tokens of `key`."""
        self._collect()
        return self._by_key.get(key)

    def publish(self, key: bytes, block: int) -> None:
        """Say what a finished block holds, so that rows with the same tokens find it."""
        if key not in self._by_key:
            self._by_key[key] = block
            self._key_of[block] = key

    # -- promises ------------------------------------------------------------------------------------------------------

    @property
    def promised(self) -> int:
        """Blocks that the rows here may still come to need, of what they were promised."""
        return sum(table.outstanding for table in self._tables)

    @property
    def unpromised(self) -> int:
        """Blocks that a newcomer may be promised."""
        return self.free - self.promised

    # -- looking -------------------------------------------------------------------------------------------------------

    def stats(self) -> PoolStats:
        """The pool now."""
        used, tables = self.used, list(self._tables)
        return PoolStats(
            capacity=self.capacity,
            touched=self.touched,
            used=used,
            referenced=sum(self.references.values()),
            shared=sum(count > 1 for count in self.references.values()),
            promised=sum(table.outstanding for table in tables),
            tables=len(tables),
            tokens=sum(sum(block != NULL for block in table.blocks) for table in tables) * self.block_tokens,
            block_tokens=self.block_tokens,
        )

    def faults(self) -> list[str]:
        """What is wrong with the books: references that no table explains, blocks lost or in two places."""
        self._collect()
        counted: dict[int, int] = {}
        for table in self._tables:
            for block in table.blocks:
                if block != NULL:
                    counted[block] = counted.get(block, 0) + 1
        found = []
        for block in sorted(counted.keys() | self.references.keys()):
            if counted.get(block, 0) != self.references.get(block, 0):
                found.append(
                    f"block {block} has {self.references.get(block, 0)} references and {counted.get(block, 0)} tables"
                )
        everywhere = sorted([*self.references, *self._free])
        if everywhere != list(range(1, self.touched + 1)):
            found.append(f"blocks 1 to {self.touched} should be used or free once each, not {everywhere}")
        if strays := [block for block in self._key_of if block not in self.references]:
            found.append(f"free blocks {strays} have keys")
        return found
