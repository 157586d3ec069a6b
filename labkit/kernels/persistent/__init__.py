"""Whole decoder layers of a decode step in one launch each, for one to eight rows.

| operation | launches of the plain form | grid-wide barriers |
| --- | --- | --- |
| `sparse_half` | 4 | 2 |
| `linear_layer` | 8 | 5 |
| `full_layer` | 10 | 7 |

One launch and the fill that its counter needs stand for those of the plain form (`plain.py`, the oracle). What the next
stage reads is sent for before each barrier. All threadgroups must live at once: two of 128 threads on each
multiprocessor, which no choice of the compiler's can undo (255 registers, 48 KB), so CUDA and the simulator run these
kernels, and Metal refuses them. `prediction.py` says what it should gain; README.md what that rests on.
"""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.door import takes_arrays
from labkit.kernels.persistent.arguments import SIMDS, Attention, Cached, Delta, Sparse
from labkit.kernels.persistent.launches import (
    FULL_LAYER,
    LINEAR_LAYER,
    SPARSE_HALF,
    full_layer_call,
    full_words,
    linear_layer_call,
    linear_words,
    sparse_half_call,
    sparse_words,
)
from labkit.kernels.quantized_matmul.packed import forms
from labkit.kernels.resident import H200, always, multiprocessors
from labkit.kernels.targets import target_in_use

__all__ = [
    "FULL_LAYER",
    "LINEAR_LAYER",
    "SPARSE_HALF",
    "Attention",
    "Cached",
    "Delta",
    "Sparse",
    "full_layer",
    "full_layer_call",
    "groups_for",
    "linear_layer",
    "linear_layer_call",
    "sparse_half",
    "sparse_half_call",
]

SIMULATED = 4
"""Threadgroups in the simulator, which runs them all on one core."""


def groups_for(target: str | None) -> int:
    """Threadgroups of a launch: as many as are sure to live at once on the target; an H200's where none is there."""
    if target == "simulator":
        return SIMULATED
    return always(32 * SIMDS) * (multiprocessors() if target == "cuda" else H200)


@takes_arrays
def sparse_half(
    update: mx.array, stream: mx.array, sparse: Sparse, eps: float, *, target: str | None = None
) -> tuple[mx.array, mx.array]:
    """From a mixer's output to the end of a layer with sparse MLP: residual and norm, router, choice, experts, sum.

    Args:
        update, stream: [T, D], T at most 8, D a multiple of 32; float32, float16 or bfloat16.
        sparse: the weights. eps: of the norm. target: where to run (`labkit.kernels.targets`).

    Returns:
        hidden [T, D], the residual stream with the mixer's output; y [T, D], what the MLP adds to it.

    Raises:
        ValueError: shapes, dtypes or sizes that do not fit, or more threadgroups than live at once.
        RuntimeError: the target cannot run it (Metal), or does not say how many multiprocessors it has.

    Source: `labkit.kernels.fused.norm_router`, `routing.choose_experts` and `grouped_matmul.decode_experts`, whose
    functions it calls.
    """
    where, form = _where(update, sparse, target)
    call = sparse_half_call(update, stream, sparse, eps, form, groups=groups_for(where))
    (words,) = SPARSE_HALF[form](**call, target=target)
    rows, dim = update.shape
    held = sparse_words(rows, dim, sparse.router.n, _inner(sparse), update.dtype)
    return tuple(held.take(words, "hidden", "y"))


@takes_arrays
def linear_layer(
    update: mx.array,
    stream: mx.array,
    delta: Delta,
    tail: mx.array,
    state: mx.array,
    sparse: Sparse,
    eps: float,
    *,
    target: str | None = None,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """A Gated DeltaNet layer for one token of each row.

    Args:
        update, stream: [B, D], what the layer before adds to the residual stream, and the stream.
        delta, sparse: the weights; their scales of one dtype.
        tail: [B, 3, C], the convolution's last tokens. state: [B, Hv, Dv, Dk], float32.
        eps: of all norms. target: where to run.

    Returns:
        hidden and y [B, D] as `sparse_half`; the new state and the new tail, which are views of one output.

    Raises:
        ValueError, RuntimeError: as `sparse_half`.

    Source: as `sparse_half`, and `labkit.kernels.gated_delta.decode_step`.
    """
    where, form = _where(update, sparse, target)
    groups = groups_for(where)
    call = linear_layer_call(update, stream, delta, tail, state, sparse, eps, form, groups=groups)
    (words,) = LINEAR_LAYER[form](**call, target=target)
    sizes = (*delta.heads, *delta.dims, delta.inputs.n)
    held = linear_words(*update.shape, sparse.router.n, _inner(sparse), sizes, groups, update.dtype)
    return tuple(held.take(words, "hidden", "y", "state", "tail"))


@takes_arrays
def full_layer(
    update: mx.array,
    stream: mx.array,
    attention: Attention,
    cached: Cached,
    sparse: Sparse,
    eps: float,
    *,
    target: str | None = None,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """A gated attention layer for one token of each row.

    Args:
        update, stream: [B, D], as for `linear_layer`. attention, sparse: the weights; their scales of one dtype.
        cached: the columns and where the new one goes. eps: of all norms. target: where to run.

    Returns:
        hidden and y [B, D] as `sparse_half`; the tails of keys and values with the new column.

    Raises:
        ValueError, RuntimeError: as `sparse_half`.

    Source: as `sparse_half`, with `labkit.kernels.fused.append_heads` and `labkit.kernels.attention.decode_rows`.
    """
    where, form = _where(update, sparse, target)
    groups = groups_for(where)
    call = full_layer_call(update, stream, attention, cached, sparse, eps, form, groups=groups)
    (words,) = FULL_LAYER[form](**call, target=target)
    parts = call["inputs"][FULL_LAYER[form].text.input_names.index("PARTS")]
    sizes = (*attention.heads, attention.q_norm.size, cached.tail_keys.shape[2], parts, attention.inputs.n)
    held = full_words(*update.shape, sparse.router.n, _inner(sparse), sizes, groups, update.dtype)
    return tuple(held.take(words, "hidden", "y", "tail_keys", "tail_values"))


def _where(update: mx.array, sparse: Sparse, target: str | None) -> tuple[str | None, str]:
    """The target, and the form of products that it gets."""
    where = target_in_use(target)
    return where, "tensor" if where == "cuda" and "tensor" in forms(update, sparse.gate, sparse.down) else "plain"


def _inner(sparse: Sparse) -> tuple[int, int]:
    return sparse.top_k + sparse.shared, sparse.gate.n
