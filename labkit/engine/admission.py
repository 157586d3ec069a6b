"""Who may start: projected bytes of the caches against one budget that all live requests share."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.caches.extra_keys import ExtraKeys
from labkit.engine.capacity import Budget, Capacity
from labkit.engine.request import Request


class Admission:
    """Decides before anything is allocated, from lengths alone.

    Rows that decode together lie in one rectangle (sliding windows and recurrent states: in as many equal slots), so n
    rows are projected as n times the longest of them. A request counts with all the tokens it may come to have: no
    request that has started has to stop for lack of room. An empty engine admits whatever is not refused at the door.

    Args:
        budget: sizes of caches, and what there is.
        chunk: tokens of a prefill at most.
        max_rows: rows at most.
        rectangle: whether rows share a rectangle, or each has caches of its own.
    """

    def __init__(self, budget: Budget, *, chunk: int, max_rows: int, rectangle: bool = True):
        self._budget, self._chunk = budget, chunk
        self.max_rows, self.rectangle = max_rows, rectangle

    @property
    def capacity(self) -> Capacity:
        """The numbers by which requests are admitted."""
        return self._budget.capacity

    def check(self, request: Request) -> None:
        """Let a request pass that can ever fit.

        Raises:
            CapacityError: one that never will, with the seven numbers.
        """
        self._budget.admit(len(request.tokens), request.params.max_tokens, chunk=self._chunk)

    def projected(self, totals: Sequence[int]) -> int:
        """Bytes of the caches of live requests at most.

        Args:
            totals: prompt and answer tokens of each, as many as they may become.
        """
        if not totals:
            return 0
        if self.rectangle:
            return len(totals) * self._bytes(max(totals))
        return sum(self._bytes(total) for total in totals)

    def _bytes(self, tokens: int) -> int:
        return self._budget.cache_bytes(tokens, chunk=min(self._chunk, tokens))

    def fits_now(self, total: int, live: Sequence[int], tokens: Sequence[int] = (), extra: ExtraKeys = ()) -> bool:
        """Whether a request of `total` tokens may start beside those that live; `tokens`, its prompt, and its `extra`
        keys, where rows share memory."""
        if not live:
            return True
        return len(live) < self.max_rows and self.left([*live, total]) >= 0

    def left(self, live: Sequence[int]) -> int:
        """Bytes that nobody needs when those that live are as long as they may become; below 0, what they lack."""
        capacity = self.capacity
        return capacity.capacity_bytes - capacity.weights_bytes - self.idle_bytes() - self.projected(live)

    def idle_bytes(self) -> int:
        """Bytes in use that rows may take without any becoming more."""
        return 0

    def promises(self, total: int, tokens: Sequence[int], extra: ExtraKeys = ()) -> bool:
        """Whether what rows are promised beforehand, whatever memory is free, suffices for one more."""
        return True
