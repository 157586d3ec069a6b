"""What native code reads of a layer, of its cache, and of a forward: records of addresses and sizes.

Whoever fills a record holds the arrays that it names.
"""

from __future__ import annotations

from ctypes import addressof, c_char
from typing import Any

import numpy as np


def _record(numbers: str, factors: str = "") -> np.dtype:
    fields = [(name, "i8") for name in numbers.split()] + [(name, "f4") for name in factors.split()]
    return np.dtype(fields, align=True)


LAYER = _record(
    "arena width input_norm post_norm inputs parts columns output mixed "
    "attends key_heads value_heads key_dim value_dim conv a_log dt_bias mixer_norm "
    "query_heads kv_heads head_dim half q_norm k_norm scale "
    "experts top_k slots renormalise router router_parts router_columns expert_gate expert_up expert_down "
    "gate up down factor",
    "eps",
)
"""One layer, its weights' addresses in the checkpoint's order.

    arena: bytes of all matrices; these by the addresses of their descriptions, int64 [FIELDS] each.
    inputs, parts, columns: the mixer's input matrices, how many, floats of a token's row of their outputs.
    output: the mixer's; mixed: floats of a token's row before it. attends: 1 for attention, 0 for DeltaNet.
    scale: address of float32 [1]. half: rotated pairs of a head.
    experts ... expert_down: 0 in dense layers. factor: 1 where the MLP `gate`, `up`, `down` (0: none) is a shared
    expert with a gate of its own, whose factor stands behind the experts' weights.
"""

CACHE = _record("keys values capacity first column tail state recorded states tails")
"""One layer's cache.

    keys, values, capacity: [B, heads, capacity, head_dim]. first, column: int64 [B], each row's first column in use,
    and that of its first new token.
    tail, state: [B, 3, channels] and [B, heads, DV, DK]. recorded, states, tails: of how many tokens of a row what
    comes after each is wanted, and where.
"""

MODEL = _record("layers count width inputs mixed taken experts product half kv_heads norm eps arena matrix outputs")
"""All layers and the head.

    layers, count: LAYER [count]. width, inputs, mixed, product: floats of a token's row: of the residual stream, of the
    widest layer's inputs, of the widest before its output matrix, of an expert's output.
    taken, experts: of a token and of a layer; 0 in dense models. half: rotated pairs of a head.
    norm, eps: addresses of float32 [width], the last norm's, and of float32 [1]. arena, matrix, outputs: the head's.
"""

FORWARD = _record("x starts cosines sines caches cache_rows chosen each logits")
"""One forward: M tokens of B rows, all row after row.

    x: float32 [M, width], the residual stream. starts: int64 [B + 1], the rows' first tokens. cosines, sines: float32
    [M, half]. caches, cache_rows: CACHE [count] of all rows, and for each address the bytes from row to row.
    chosen, each: int64 [B each], tokens among all whose logits, float32 [B each, outputs], are wanted; -1 is padding.
"""

CALL = _record(
    "tokens rows x normed inputs mixed starts row_of cosines sines blocks block_count "
    "chosen factors order places expert_blocks expert_rows expert_count products"
)
"""What stages work on: M tokens of B rows of a forward, numbered from the first of these.

    x, normed: float32 [M, width], the residual stream and room. inputs, mixed: room for the widest layer's.
    starts: int64 [B + 1], the rows' first tokens; row_of: int64 [M]. cosines, sines: float32 [M, half].
    blocks, block_count: of queries. The others are room for routing; expert_rows: of a block at most.
"""


def filled(kind: np.dtype, **values: Any) -> np.ndarray:
    """A record [1]; an array stands for its address, and what is not named is 0."""
    numbers = {name: address(value) if isinstance(value, np.ndarray) else value for name, value in values.items()}
    return np.array([tuple(numbers.pop(name, 0) for name in kind.names)], kind)


READ = frozenset(map(np.dtype, ("f4", "i8", "u1")))
"""What native code takes an address for: float32, int64, bytes; and records. It reads no dtype, so another one would be
read as one of these."""


def address(array: np.ndarray) -> int:
    """Of the first byte of an array whose rows lie behind each other."""
    assert array.flags.c_contiguous, "native code reads row behind row"
    assert array.dtype in READ or array.dtype.kind == "V", f"native code does not read {array.dtype}"
    if array.size and array.flags.writeable:  # twenty times a step, and numpy's own answer takes longer
        return addressof(c_char.from_buffer(array))
    return array.ctypes.data
