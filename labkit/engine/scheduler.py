"""What the engine does next: a policy over plain data, without arrays, clocks or threads.

* Order: a request of priority p goes as if it had arrived p * `AGEING_SECONDS` earlier. So priorities overtake, and
  nobody starves: whoever has waited that long goes before newcomers of the next priority.
* Rows wait for at most one chunk: after each chunk of a prompt, every lane of running rows decodes one token before the
  next chunk. A chunk is one forward of at most `chunk` columns, padding included. A prompt waits for at most one token
  of each lane between two of its chunks.
* Prompts whose rest fits into one chunk are packed into one forward while at most a quarter of it is padding. They
  and the chunks of longer prompts take turns: a long prompt loses at most every other chunk to short ones, and a
  short one waits for at most one chunk of a long one beyond those of short ones before it.
* A prompt that `follows` another is not computed: it gets the state of the prefix that they share.
* Chunks end on the grid (multiples of its width from the prompt's beginning) whatever else happens, so that where a
  prompt is cut depends on nothing but its length; stored prefixes lie on the same grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

AGEING_SECONDS = 30.0
PADDING_SHARE = 0.25  # of a packed forward's columns


@dataclass(frozen=True)
class Prompt:
    """A prompt that is being computed.

    Attributes:
        id: the request's.
        done, goal: tokens in the caches, and how many must be there before decoding begins.
        follows: whether it waits for a prefix that another prompt's chunks are just computing.
        alone: whether it must not share a forward.
    """

    id: str
    done: int
    goal: int
    follows: bool = False
    alone: bool = False


@dataclass(frozen=True)
class Plan:
    """One step.

    Attributes:
        kind: "prefill" of some prompts, "decode" of one lane, or "idle" when there is nothing to do.
        rows: the prompts.
        spans: (start, end) of the tokens of each.
        lane: which lane decodes.
    """

    kind: Literal["prefill", "decode", "idle"]
    rows: tuple[str, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    lane: str | None = None


def due(priority: float, arrival: float) -> float:
    """What requests are ordered by, the smallest first: the arrival, brought forward by the priority."""
    return arrival - priority * AGEING_SECONDS


class Scheduler:
    """Decides step by step. It remembers whose turn it is, and nothing about any request.

    Args:
        grid: tokens of a chunk; chunks end on its multiples.
        pack: whether several prompts may share a forward. Without, what is computed for a prompt depends on it alone.
    """

    def __init__(self, grid: int, *, pack: bool = True):
        self.grid, self.pack = grid, pack
        self._owed: list[str] = []  # lanes that decode before the next chunk
        self._last: Literal["short", "long"] | None = None

    def plan(self, prompts: Sequence[Prompt], lanes: Sequence[str], chunk: int | None = None) -> Plan:
        """The next step.

        Args:
            prompts: being computed, the first in line first.
            lanes: rows that decode together, by name.
            chunk: tokens of a forward at most, where memory allows no whole grid cell.
        """
        self._owed = [lane for lane in self._owed if lane in lanes]
        if not self._owed:
            prefill = self._prefill([prompt for prompt in prompts if not prompt.follows], chunk or self.grid)
            self._owed = list(lanes)
            if prefill is not None:
                return prefill
        if self._owed:
            return Plan("decode", lane=self._owed.pop(0))
        return Plan("idle")

    def _prefill(self, prompts: Sequence[Prompt], chunk: int) -> Plan | None:
        if not prompts:
            return None
        short = [prompt for prompt in prompts if self._end(prompt, chunk) == prompt.goal]
        long = [prompt for prompt in prompts if self._end(prompt, chunk) < prompt.goal]
        if short and long:
            first = "short" if prompts[0] is short[0] else "long"
            turn = first if self._last is None else "long" if self._last == "short" else "short"
        else:
            turn = "short" if short else "long"
        self._last = turn
        chosen = self._packed(short, chunk) if turn == "short" else long[:1]
        spans = tuple((prompt.done, self._end(prompt, chunk)) for prompt in chosen)
        return Plan("prefill", tuple(prompt.id for prompt in chosen), spans)

    def _end(self, prompt: Prompt, chunk: int) -> int:
        """Where the next chunk of a prompt ends."""
        return min(prompt.done + chunk, (prompt.done // self.grid + 1) * self.grid, prompt.goal)

    def _packed(self, short: Sequence[Prompt], chunk: int) -> list[Prompt]:
        """The first in line, and whoever fits beside it."""
        chosen = [short[0]]
        if short[0].alone or not self.pack:
            return chosen
        for prompt in short[1:]:
            lengths = [other.goal - other.done for other in (*chosen, prompt)]
            columns = len(lengths) * max(lengths)
            if not prompt.alone and columns <= chunk and columns - sum(lengths) <= PADDING_SHARE * columns:
                chosen.append(prompt)
        return chosen
