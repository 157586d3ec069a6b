"""What speculation can gain at batch 1, by bytes: several rows are verified at once, and each may want other experts.

A draft proposes k tokens; one forward of k + 1 rows verifies them and gives one token more than it accepts. If every
proposal is accepted with probability a, independently, a round yields 1 + a + ... + a^k tokens. It costs the bytes of
that forward, and k steps of the draft.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.measure.model_costs import ModelCosts


@dataclass(frozen=True)
class Speculation:
    """Speculation with one model at one context, all costs in bytes moved.

    Attributes:
        costs: of the model. context: tokens in the caches. drafted: k, proposals a round.
        draft: a draft's step as a share of the model's.
    """

    costs: ModelCosts
    context: int
    drafted: int
    draft: float = 0.0

    def __post_init__(self) -> None:
        if self.drafted < 1 or self.draft < 0:
            raise ValueError(f"a round drafts at least one token, at no negative cost: {self.drafted}, {self.draft}")

    @property
    def step_bytes(self) -> float:
        """Of a plain decode step."""
        return self.costs.decode(self.context).bytes

    @property
    def verify_bytes(self) -> float:
        """Of one forward of k + 1 rows of the same sequence: weights as for so many rows under even routing, one state,
        one read of the keys and values."""
        rows = self.drafted + 1
        weights = sum(self.costs.decode_by_part(rows).values())
        kv = self.costs.kv_bytes(self.context) + rows * self.costs.kv_bytes_per_token
        return weights + 2 * self.costs.state_bytes + kv

    def tokens(self, acceptance: float) -> float:
        """Tokens that a round yields on average.

        Raises:
            ValueError: an acceptance outside 0 to 1.
        """
        if not 0 <= acceptance <= 1:
            raise ValueError(f"acceptance must lie between 0 and 1, not {acceptance}")
        return sum(acceptance**power for power in range(self.drafted + 1))

    def gain(self, acceptance: float) -> float:
        """Tokens a byte against plain decoding: below 1 speculation loses."""
        spent = self.verify_bytes + self.drafted * self.draft * self.step_bytes
        return self.tokens(acceptance) * self.step_bytes / spent

    def break_even(self) -> float | None:
        """The acceptance from which on speculation gains, to a thousandth; None if it never does."""
        if self.gain(1.0) < 1:
            return None
        low, high = 0.0, 1.0
        while high - low > 5e-4:
            middle = (low + high) / 2
            low, high = (low, middle) if self.gain(middle) >= 1 else (middle, high)
        return high
