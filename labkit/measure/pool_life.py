"""The life of a pool of blocks under requests that come and go: the real allocator, lengths instead of arrays.

What pages waste is decided by lengths alone, so that thousands of requests are lived through in a second. The same
requests in one rectangle, as wide as the longest row and rounded up as its buffers are, stand beside it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.caches import BlockPool, Table, block_keys
from labkit.caches.block_pool import NULL
from labkit.caches.contiguous import rounded

FREE, UNTOUCHED = 0, -1


@dataclass(frozen=True)
class Life:
    """One request: it arrives at `step`, has `prompt` tokens of which the first `shared` are common to all, and answers
    with `answer`, one a step."""

    step: int
    prompt: int
    answer: int
    shared: int = 0


@dataclass(frozen=True)
class Moment:
    """One step, in tokens unless said otherwise.

    Attributes:
        owners: of each block 1.. of the pool: a request's number from 1 on (the first that names it), `FREE`, or
            `UNTOUCHED` where there is no memory yet.
        shared: blocks in use by several rows, by number.
        rows, waiting: requests that run, and that wait for blocks.
        tokens: of all rows. distinct: those in blocks, each block once, and in tails.
        blocks: places in used blocks. idle: in freed ones that keep their memory. tails: in tails.
        rectangle: columns of the same rows side by side in one buffer.
    """

    step: int
    owners: tuple[int, ...]
    shared: tuple[int, ...]
    rows: int
    waiting: int
    tokens: int
    distinct: int
    blocks: int
    idle: int
    tails: int
    rectangle: int

    @property
    def held(self) -> int:
        """Places with memory behind them."""
        return self.blocks + self.idle + self.tails

    @property
    def paged_waste(self) -> float:
        """The share of the pages' memory that holds no token."""
        return 1 - self.distinct / self.held if self.held else 0.0

    @property
    def rectangle_waste(self) -> float:
        """The share of the rectangle that holds no token, or one that another row holds too."""
        return 1 - self.distinct / self.rectangle if self.rectangle else 0.0


def random_lives(count: int, *, seed: int, every: float = 3.0, shared: int = 0, longest: int = 400) -> list[Life]:
    """Requests with lengths spread over two orders of magnitude, arriving at random.

    Args:
        count: requests. seed: of their lengths and times. every: steps between two of them, on average.
        shared: tokens at the beginning of every second prompt that are the same.
        longest: tokens of a prompt at most, besides.
    """
    draw, step, lives = random.Random(seed), 0.0, []
    for number in range(count):
        step += draw.expovariate(1 / every)
        head = shared if number % 2 else 0
        length = head + max(2, int(longest ** draw.random()))
        lives.append(Life(int(step), length, max(2, int(120 ** draw.random())), head))
    return lives


def live(lives: Sequence[Life], *, block_tokens: int, capacity: int, max_rows: int = 8) -> list[Moment]:
    """Every step from the first request to the last.

    Args:
        lives: the requests, by step.
        block_tokens, capacity: of the pool; a row's tail holds one block.
        max_rows: rows at a time.

    Raises:
        PoolExhausted: a request that the empty pool cannot hold.
    """
    pool, waiting = BlockPool(capacity, block_tokens), deque(enumerate(lives, 1))
    rows: dict[int, _Row] = {}
    moments, step = [], 0
    for _, life in waiting:
        pool.require((life.prompt + life.answer) // block_tokens)
    while waiting or rows:
        while waiting and waiting[0][1].step <= step and len(rows) < max_rows:
            number, life = waiting[0]
            row = _Row(pool, number, life)
            if row.table.new_blocks_needed((life.prompt + life.answer) // block_tokens, set()) > pool.unpromised:
                break
            waiting.popleft()
            row.begin()
            rows[number] = row
        moments.append(_moment(step, pool, rows, sum(life.step <= step for _, life in waiting)))
        for number, row in list(rows.items()):
            if not row.go_on():
                row.table.release()
                del rows[number]
        step += 1
    return moments


class _Row:
    def __init__(self, pool: BlockPool, number: int, life: Life):
        # Token numbers: those below `shared` are common to all, the others this request's own.
        own = 1_000_000 * number
        prompt = [*range(life.shared), *range(own, own + life.prompt - life.shared)]
        self.table = Table(pool, block_keys(prompt, pool.block_tokens))
        self.length, self.left, self.size = life.prompt, life.answer, pool.block_tokens
        self.total = life.prompt + life.answer

    def begin(self) -> None:
        self.table.promised = self.total // self.size
        self.table.grow(self.length // self.size)

    def go_on(self) -> bool:
        """One token; whether there is another."""
        if self.length - self.table.tokens == self.size:
            self.table.grow(1)
        self.length, self.left = self.length + 1, self.left - 1
        return self.left > 0


def _moment(step: int, pool: BlockPool, rows: dict[int, _Row], waiting: int) -> Moment:
    owners = [FREE] * pool.touched + [UNTOUCHED] * (pool.capacity - pool.touched)
    for number, row in rows.items():
        for block in row.table.blocks:
            if block != NULL and owners[block - 1] == FREE:
                owners[block - 1] = number
    lengths = [row.length for row in rows.values()]
    in_tails = sum(row.length - row.table.tokens for row in rows.values())
    return Moment(
        step=step,
        owners=tuple(owners),
        shared=tuple(block for block, count in pool.references.items() if count > 1),
        rows=len(rows),
        waiting=waiting,
        tokens=sum(lengths),
        distinct=pool.used * pool.block_tokens + in_tails,
        blocks=pool.used * pool.block_tokens,
        idle=(pool.touched - pool.used) * pool.block_tokens,
        tails=len(rows) * pool.block_tokens,
        rectangle=len(rows) * rounded(max(lengths, default=0)),
    )
