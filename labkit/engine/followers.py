"""Prompts with a common beginning: who waits for whose chunks, and where a state is handed on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from labkit.caches.extra_keys import holding
from labkit.engine.request import Request
from labkit.engine.session import Session


def shared_cells(a: Request, b: Request, grid: int, limit: int) -> int:
    """Tokens of the common beginning of two prompts in whole grid cells, `limit` at most: as far as their tokens are
    equal, and the extra keys that hold there."""
    end = 0
    while end + grid <= limit and a.tokens[end : end + grid] == b.tokens[end : end + grid]:
        if holding(a.extra, end + grid) != holding(b.extra, end + grid):
            break
        end += grid
    return end


class Followers:
    """Which prompt waits for which other, and up to where.

    A prompt follows one before it whose chunks are still to come to a boundary that both share and that lies beyond
    its own state: computing the same chunks twice would take longer than waiting. A state is handed on exactly at the
    boundary, since that of a recurrent layer cannot be taken back to it later. Whoever loses its leader looks for
    another.
    """

    def __init__(self, grid: int):
        self.grid = grid
        self._leads: dict[str, tuple[Session, int]] = {}  # follower's id -> (leader, boundary)

    def update(self, prompts: Sequence[Session]) -> None:
        """Look again who follows whom, among prompts that are being computed, the first in line first."""
        present = {session.id for session in prompts}
        self._leads = {
            id: (leader, end)
            for id, (leader, end) in self._leads.items()
            if id in present and leader.id in present and leader.prefilled <= end
        }
        for place, session in enumerate(prompts):
            if session.id not in self._leads and (found := self._leader(session, prompts[:place])) is not None:
                self._leads[session.id] = found

    def _leader(self, session: Session, before: Iterable[Session]) -> tuple[Session, int] | None:
        best, reach = None, session.prefilled
        for other in before:
            # Answers that are computed again after a failed restore are no common beginning.
            limit = min(session.to_prefill, other.to_prefill, len(session.request.tokens), len(other.request.tokens))
            if limit - limit % self.grid <= reach:
                continue
            end = shared_cells(session.request, other.request, self.grid, limit)
            if end > reach and other.prefilled <= end:
                best, reach = (other, end), end
        return best

    def follows(self, session: Session) -> bool:
        """Whether a prompt waits."""
        return session.id in self._leads

    def arrived(self, leader: Session) -> set[str]:
        """Ids of those who waited for what the leader's caches hold now; they wait no longer."""
        ids = {id for id, (who, end) in self._leads.items() if who is leader and end == leader.prefilled}
        for id in ids:
            del self._leads[id]
        return ids
