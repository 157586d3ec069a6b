"""What each fused chain saves over MLX's separate operations: launches, and bytes to and from memory.

Counted, not timed. Bytes are those of each operation's inputs and outputs, once; what a cache keeps between operations
is not taken off. Views (splits, reshapes, transposes) are free unless an operation needs its input in one piece: then
MLX copies it, and the copy counts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """launches: operations that reach the device. bytes: read and written by them."""

    launches: int
    bytes: int


@dataclass(frozen=True)
class Saving:
    """A chain as separate operations, and as one kernel."""

    separate: Cost
    fused: Cost

    @property
    def launches(self) -> int:
        """Launches saved."""
        return self.separate.launches - self.fused.launches

    @property
    def bytes(self) -> int:
        """Bytes saved."""
        return self.separate.bytes - self.fused.bytes


def residual_rms_norm(tokens: int, dim: int, itemsize: int = 2) -> Saving:
    """Separate: add (2 rows in, 1 out), norm (1 in, 1 out, weight)."""
    row = tokens * dim * itemsize
    weight = dim * itemsize
    return Saving(Cost(2, 5 * row + weight), Cost(1, 4 * row + weight))


def norm_project(tokens: int, dim: int, outputs: int, bits: int = 4, group_size: int = 64, itemsize: int = 2) -> Saving:
    """Separate: the fused add and norm, and the product; fused: the norm is not written and read back. That each
    threadgroup reads the rows again is the cache's business, and not counted."""
    row = tokens * dim * itemsize
    matrix = outputs * (dim * bits // 8 + 2 * (dim // group_size) * itemsize)
    rest = dim * itemsize + matrix + tokens * outputs * itemsize
    return Saving(Cost(2, 5 * row + rest), Cost(1, 3 * row + rest))


def norm_router(tokens: int, dim: int, experts: int, bits: int = 8, group_size: int = 64, itemsize: int = 2) -> Saving:
    """Separate: add, norm, quantised matmul with logits in the activations' dtype; fused: logits in fp32."""
    row = tokens * dim * itemsize
    router = experts * (dim * bits // 8 + 2 * (dim // group_size) * itemsize)
    weights = dim * itemsize + router
    logits = tokens * experts
    return Saving(Cost(3, 6 * row + weights + logits * itemsize), Cost(1, 4 * row + weights + logits * 4))


def qk_norm_rope(
    tokens: int, query_heads: int, key_heads: int, dim: int, itemsize: int = 2, gated: bool = True
) -> Saving:
    """Separate: with a gate one copy of q out of the projection, then a norm and a rotation of each of q and k."""
    q, k = (tokens * heads * dim * itemsize for heads in (query_heads, key_heads))
    weights = 2 * dim * itemsize
    separate = Cost(4 + gated, (6 if gated else 4) * q + 4 * k + weights)
    return Saving(separate, Cost(1, 2 * q + 2 * k + weights))


def output_gate(tokens: int, heads: int, dim: int, itemsize: int = 2, length: int = 1) -> Saving:
    """Separate: for rows of more than one token a copy into token order; a copy of the gates, sigmoid, multiply.

    The gates lie between the queries, so joining their heads needs the copy at any length.
    """
    block = tokens * heads * dim * itemsize
    layout = length > 1
    return Saving(Cost(3 + layout, (2 + 2 + 3 + 2 * layout) * block), Cost(1, 3 * block))


def gated_rms_norm(tokens: int, heads: int, dim: int, itemsize: int = 2) -> Saving:
    """Separate: the norm, and the gate that mlx-lm compiles into one more launch."""
    block = tokens * heads * dim * itemsize
    return Saving(Cost(2, 5 * block + dim * itemsize), Cost(1, 3 * block + dim * itemsize))


def embedding_rows(tokens: int, dim: int, bits: int = 4, group_size: int = 64, itemsize: int = 2) -> Saving:
    """Separate: words, scales and biases gathered, each read and written once, and read again to be dequantised."""
    packed = tokens * (dim * bits // 8 + 2 * (dim // group_size) * itemsize)
    row = tokens * dim * itemsize
    return Saving(Cost(4, 3 * packed + row), Cost(1, packed + row))


def swiglu(tokens: int, width: int, itemsize: int = 2) -> Saving:
    """Separate: sigmoid, and two products."""
    block = tokens * width * itemsize
    return Saving(Cost(3, 8 * block), Cost(1, 3 * block))
