"""Which boundaries keep a state: a policy with a budget.

Layers that remember every token are stored block by block. Layers that do not (recurrent states, rings) have to be
copied whole at a boundary, at a price that does not depend on the block: at the shape of Qwen3.6-35B-A3B, 63 MB of
states stand against 42 MB of keys and values for 2048 tokens. A prompt can go on only from a boundary with a state;
tokens between it and the last boundary that matched are computed again.

What is worth keeping, in rising order:

1. plain boundaries, thinned by a lattice: those at odd multiples of the width go first, then odd multiples of twice
   the width, and so on, so that what is left is always spread evenly and is a part of what was there before;
2. boundaries behind which prompts part: the next prompt may part there too;
3. the newest boundary of each chain: a conversation goes on from there.

Within a class, what was used longest ago goes first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Snapshot:
    """A state that is kept.

    Attributes:
        key: the block at whose end it stands.
        depth: that block's number in its chain, from 1.
        newest: no boundary behind it keeps a state.
        branching: prompts part behind it.
        used: a clock's reading at its last use.
        nbytes: its bytes.
    """

    key: str
    depth: int
    newest: bool
    branching: bool
    used: int
    nbytes: int


@dataclass(frozen=True)
class Retention:
    """The policy.

    Attributes:
        budget_bytes: of all states that this engine keeps.
        interval: a running prefill takes a state at every so many blocks, and always at the prompt's last one.
        keep_newest, keep_branching: whether those classes outrank the lattice.
        lattice: thin plain boundaries by the lattice; else by age alone.
    """

    budget_bytes: int = 8 << 30
    interval: int = 1
    keep_newest: bool = True
    keep_branching: bool = True
    lattice: bool = True

    def __post_init__(self) -> None:
        for name, low in (("budget_bytes", 0), ("interval", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise ValueError(f"{name} must be a whole number from {low} on, not {value!r}")

    def takes(self, depth: int, *, last: bool, branching: bool) -> bool:
        """Whether a running prefill should take a state at this boundary."""
        return last or branching or depth % self.interval == 0

    def surplus(self, snapshots: Sequence[Snapshot], protect: Collection[str] = ()) -> list[str]:
        """The keys whose states must go for the rest to fit the budget, the least worth first; `protect` stays."""
        over = sum(snapshot.nbytes for snapshot in snapshots) - self.budget_bytes
        leaving = []
        for snapshot in sorted(snapshots, key=self.worth):
            if over <= 0:
                break
            if snapshot.key not in protect:
                leaving.append(snapshot.key)
                over -= snapshot.nbytes
        return leaving

    def worth(self, snapshot: Snapshot) -> tuple[int, int, int, int]:
        """What orders states: class, level of the lattice, last use, depth."""
        if snapshot.newest and self.keep_newest:
            kind = 2
        elif snapshot.branching and self.keep_branching:
            kind = 1
        else:
            kind = 0
        level = level_of(snapshot.depth) if self.lattice and kind == 0 else 0
        return kind, level, snapshot.used, snapshot.depth


def level_of(depth: int) -> int:
    """The coarsest lattice that a boundary lies on: how often two divides its number."""
    return (depth & -depth).bit_length() - 1


def gaps(kept: Collection[int], blocks: int) -> list[int]:
    """For each boundary 1 to `blocks`, the blocks that are computed again if a prompt parts just behind it."""
    result, last = [], 0
    for depth in range(1, blocks + 1):
        last = depth if depth in kept else last
        result.append(depth - last)
    return result
