"""What the forms of the gated delta rule move and compute, from sizes alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaCounts:
    """One layer's gated delta rule over the tokens of a prompt.

    Attributes:
        length: tokens of a row. hk, hv, dk, dv: heads and their dimensions. rows: that run side by side.
        itemsize: bytes of an activation; the state is fp32.
    """

    length: int
    hk: int = 16
    hv: int = 32
    dk: int = 128
    dv: int = 128
    rows: int = 1
    itemsize: int = 2

    def __post_init__(self) -> None:
        if min(self.length, self.hk, self.hv, self.dk, self.dv, self.rows) < 1 or self.hv % self.hk:
            raise ValueError(f"sizes must be at least 1 and the value heads a multiple of the key heads, not of {self}")

    @property
    def state_bytes(self) -> int:
        """The state of all heads, once."""
        return self.rows * self.hv * self.dk * self.dv * 4

    @property
    def token_bytes(self) -> int:
        """Queries, keys, values and gates read once, outputs written once."""
        return self.rows * self.length * (2 * (self.hk * self.dk + self.hv * self.dv) * self.itemsize + 8 * self.hv)

    @property
    def scan_state_bytes(self) -> int:
        """State moved by the scan in registers: read once, written once."""
        return 2 * self.state_bytes

    def blocked_state_bytes(self, tokens: int = 32) -> int:
        """State moved by the blocked scan: to its output's place, then in and out for each block of `tokens`."""
        return 2 * (1 + -(-self.length // tokens)) * self.state_bytes

    def prepared_bytes(self, chunk: int = 32, itemsize: int = 4) -> int:
        """What the chunked form's first kernel hands to its second: w, u, p of each chunk and two rows of scales.

        `itemsize` is that of w and p, u and the scales are fp32.
        """
        heads, slots = self.rows * self.hv, -(-self.length // chunk)
        return heads * slots * chunk * ((self.dk + chunk) * itemsize + (self.dv + 2) * 4)

    @property
    def scan_operations(self) -> int:
        """Decay 1, S k 2, rank-one update 2, S q 2 for each element of the state and token."""
        return 7 * self.rows * self.length * self.hv * self.dk * self.dv

    def chunked_operations(self, chunk: int = 64) -> int:
        """Operations of the chunked form's matrix products, whole chunks, without its forward substitution."""
        within = 4 * self.dk + 2 * (self.dk + self.dv) + 2 * self.dv  # k k, q k; T k, T v; p v': a token and column
        heads, tokens = self.rows * self.hv, -(-self.length // chunk) * chunk
        return heads * tokens * (within * chunk + 6 * self.dk * self.dv)
