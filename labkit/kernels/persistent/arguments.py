"""What a layer consists of, as the launches of this folder take it."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from labkit.kernels.quantized_matmul.packed import Packed

SIMDS = 4
"""Simdgroups of a threadgroup: two threadgroups then live on a multiprocessor whatever registers the text takes, and
24 KB of weights are on their way in each."""


class Sparse(NamedTuple):
    """A sparse MLP with the norm before it.

    Attributes:
        norm: [D]. router: a row an expert, and the shared expert's gate last, [E + 1, D].
        gate, up: [E + shared, I, D]. down: [E + shared, D, I]. experts: E. top_k: chosen for a token.
        shared: experts behind the E that every token goes to. renormalise: whether chosen weights are made to sum to 1.
    """

    norm: mx.array
    router: Packed
    gate: Packed
    up: Packed
    down: Packed
    experts: int
    top_k: int
    shared: int
    renormalise: bool


class Delta(NamedTuple):
    """A Gated DeltaNet mixer with the norm before it.

    Attributes:
        input_norm: [D]. inputs: q, k, v, then z, a and b, [N, D]. conv: [C, 4]. a_log, dt_bias: [Hv]. norm: [Dv].
        output: [D, Hv * Dv]. heads: (Hk, Hv). dims: (Dk, Dv).
    """

    input_norm: mx.array
    inputs: Packed
    conv: mx.array
    a_log: mx.array
    dt_bias: mx.array
    norm: mx.array
    output: Packed
    heads: tuple[int, int]
    dims: tuple[int, int]


class Attention(NamedTuple):
    """A gated attention mixer with the norm before it.

    Attributes:
        input_norm: [D]. inputs: each head's query and gate, then keys, then values, [N, D]. q_norm, k_norm: [Dh].
        output: [D, Hq * Dh]. heads: (Hq, Hkv). rotary: rotated values of a head. base: of their angles.
    """

    input_norm: mx.array
    inputs: Packed
    q_norm: mx.array
    k_norm: mx.array
    output: Packed
    heads: tuple[int, int]
    rotary: int
    base: float


class Cached(NamedTuple):
    """What an attention layer remembers, and where the new column goes.

    Attributes:
        keys, values: [B, Hkv, S, Dh]. tail_keys, tail_values: [B, Hkv, C, Dh].
        first, last: int32 [B], the visible columns. settled: int32, its first value says how many stand in the buffers.
        write: int32, its first value is the tail's new column. positions: int32 [B].
    """

    keys: mx.array
    values: mx.array
    tail_keys: mx.array
    tail_values: mx.array
    first: mx.array
    last: mx.array
    settled: mx.array
    write: mx.array
    positions: mx.array
