"""What the engine does next: a policy over plain data, without arrays, clocks or threads.

* Order: a request of priority p goes as if it had arrived p * `AGEING_SECONDS` earlier. So priorities overtake, and
  no request starves: one that has waited that long goes before newcomers of the next priority.
* Rows wait for at most one chunk: after each chunk of a prompt, every lane of running rows decodes one token before the
  next chunk. A chunk is one forward of at most `chunk` columns, padding included. A prompt waits for at most one token
  of each lane between two of its chunks.
* The first prompt in line and the one that is nearest to its end take turns: the first one loses at most every other
  chunk to shorter ones, and a short prompt behind a long one waits for one chunk of it, not for all.
* A prompt's last chunk takes others' last chunks along, while all fit into one chunk and at most a quarter is padding.
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
    """

    def __init__(self, grid: int):
        self.grid = grid
        self._owed: list[str] = []  # lanes that decode before the next chunk
        self._first_was_last = False  # whether the first in line had the last turn

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
        first, quickest = prompts[0], min(prompts, key=lambda prompt: -(-(prompt.goal - prompt.done) // chunk))
        turn = quickest if self._first_was_last else first
        self._first_was_last = turn is first
        chosen = [turn] if self._end(turn, chunk) < turn.goal else self._packed(turn, prompts, chunk)
        spans = tuple((prompt.done, self._end(prompt, chunk)) for prompt in chosen)
        return Plan("prefill", tuple(prompt.id for prompt in chosen), spans)

    def _end(self, prompt: Prompt, chunk: int) -> int:
        """Where the next chunk of a prompt ends."""
        return min(prompt.done + chunk, (prompt.done // self.grid + 1) * self.grid, prompt.goal)

    def _packed(self, turn: Prompt, prompts: Sequence[Prompt], chunk: int) -> list[Prompt]:
        """A prompt at its last chunk, and whose last chunks fit beside it."""
        chosen = [turn]
        if turn.alone:
            return chosen
        for prompt in prompts:
            if prompt is turn or prompt.alone or self._end(prompt, chunk) < prompt.goal:
                continue
            lengths = [other.goal - other.done for other in (*chosen, prompt)]
            columns = len(lengths) * max(lengths)
            if columns <= chunk and columns - sum(lengths) <= PADDING_SHARE * columns:
                chosen.append(prompt)
        return chosen
