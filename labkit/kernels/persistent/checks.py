"""What the launches of whole layers refuse, before anything is launched."""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.fused.launches import MAX_ROUTED_DIM
from labkit.kernels.gated_delta.recurrence import PACKED
from labkit.kernels.persistent.arguments import SIMDS, Attention, Cached, Delta, Sparse
from labkit.kernels.quantized_matmul.launches import FEW, check_form
from labkit.kernels.quantized_matmul.packed import Packed
from labkit.kernels.routing.launches import MAX_EXPERTS, MAX_K


def check_sparse(update: mx.array, stream: mx.array, sparse: Sparse, form: str) -> tuple[int, int]:
    """Rows and width of a layer's input. Raises ValueError for what does not fit."""
    if update.ndim != 2 or update.shape != stream.shape or update.dtype != stream.dtype:
        raise ValueError(f"update and stream need one shape [T, D] and dtype, not {update.shape} and {stream.shape}")
    rows, dim = update.shape
    if not 1 <= rows <= FEW:
        raise ValueError(f"a persistent launch takes 1 to {FEW} rows, not {rows}: use the plain form")
    if dim % 32 or dim > MAX_ROUTED_DIM:
        raise ValueError(f"rows of a multiple of 32 values up to {MAX_ROUTED_DIM} are needed, not {dim}")
    _vector("norm", sparse.norm, dim, update.dtype)
    groups, slots = sparse.experts + sparse.shared, sparse.top_k + sparse.shared
    if groups > MAX_EXPERTS or slots > MAX_K or sparse.router.n < sparse.experts + (sparse.shared > 0):
        raise ValueError(
            f"{slots} of {groups} experts, scores from {sparse.router.n} rows: at most {MAX_K} of {MAX_EXPERTS}, and a "
            "row for each expert and for the shared one's gate"
        )
    for name, matrix, shape in (
        ("router", sparse.router, (1, sparse.router.n, dim)),
        ("gate", sparse.gate, (groups, sparse.gate.n, dim)),
        ("up", sparse.up, (groups, sparse.gate.n, dim)),
        ("down", sparse.down, (groups, dim, sparse.gate.n)),
    ):
        _matrix(name, matrix, shape)
    if sparse.gate.template != sparse.up.template:
        raise ValueError("gate and up need one dtype, group size and number of bits")
    check_form(form, update, sparse.gate, sparse.up, sparse.down)
    _one_dtype(sparse.gate, sparse.down)
    return rows, dim


def check_delta(
    delta: Delta, rows: int, dim: int, tail: mx.array, state: mx.array, sparse: Sparse, form: str
) -> mx.array:
    """The convolution's weights as [C, 4]. Raises ValueError for what does not fit."""
    dtype, (hk, hv), (dk, dv) = sparse.norm.dtype, delta.heads, delta.dims
    channels, width = 2 * hk * dk + hv * dv, hv * dv
    at_once = SIMDS * (32 // PACKED.lanes) * PACKED.columns
    if hv % hk or any(d % 32 or not 32 <= d <= 256 for d in delta.dims) or dv % at_once:
        raise ValueError(
            f"heads {delta.heads} of {delta.dims}: sizes from 32 to 256, values a multiple of {at_once}, and value "
            "heads a multiple of key heads are needed"
        )
    _vector("input_norm", delta.input_norm, dim, dtype)
    _matrix("inputs", delta.inputs, (1, channels + width + 2 * hv, dim))
    _matrix("output", delta.output, (1, dim, width))
    check_form(form, delta.input_norm, delta.inputs, delta.output)
    _one_dtype(sparse.gate, delta.inputs, delta.output)
    if delta.inputs.n % 4 or channels % 4:
        raise ValueError(f"{channels} channels of {delta.inputs.n} outputs: multiples of four are read at a time")
    if tail.shape != (rows, 3, channels) or tail.dtype != dtype:
        raise ValueError(f"tail needs shape {(rows, 3, channels)} in {dtype}, not {tail.shape} {tail.dtype}")
    if state.shape != (rows, hv, dv, dk) or state.dtype != mx.float32:
        raise ValueError(f"state needs shape {(rows, hv, dv, dk)} in float32, not {state.shape} {state.dtype}")
    if delta.conv.size != channels * 4 or delta.a_log.shape != (hv,) or delta.dt_bias.shape != (hv,):
        raise ValueError(f"conv, a_log and dt_bias do not fit {channels} channels and {hv} heads")
    if delta.norm.shape != (dv,):
        raise ValueError(f"norm needs shape ({dv},), not {delta.norm.shape}")
    return delta.conv if delta.conv.ndim == 2 else delta.conv.reshape(channels, 4)


def check_attention(attention: Attention, rows: int, dim: int, cached: Cached, sparse: Sparse, form: str) -> int:
    """A head's width. Raises ValueError for what does not fit."""
    dtype, (hq, hkv), width = sparse.norm.dtype, attention.heads, attention.q_norm.size
    if hq % hkv or width % (64 if form == "tensor" else 32) or not 32 <= width <= 256:
        raise ValueError(f"heads {attention.heads} of {width}: a multiple of 64 up to 256 is needed (32, form 'plain')")
    if not 2 <= attention.rotary <= width or attention.rotary % 2:
        raise ValueError(f"rotary must be even, from 2 to {width}, not {attention.rotary}")
    _vector("input_norm", attention.input_norm, dim, dtype)
    _matrix("inputs", attention.inputs, (1, 2 * (hq + hkv) * width, dim))
    _matrix("output", attention.output, (1, dim, hq * width))
    check_form(form, attention.input_norm, attention.inputs, attention.output)
    _one_dtype(sparse.gate, attention.inputs, attention.output)
    if attention.k_norm.shape != (width,) or attention.k_norm.dtype != attention.q_norm.dtype:
        raise ValueError(f"k_norm needs shape ({width},) and q_norm's dtype, not {attention.k_norm.shape}")
    for name in ("keys", "values", "tail_keys", "tail_values"):
        array = getattr(cached, name)
        like = cached.keys if name in ("keys", "values") else cached.tail_keys
        if array.shape != (rows, hkv, like.shape[2], width) or array.dtype != dtype:
            raise ValueError(f"{name} needs {rows} rows of {hkv} heads of {width} in {dtype}, not {array.shape}")
    for name in ("first", "last", "positions"):
        if getattr(cached, name).shape != (rows,):
            raise ValueError(f"{name} needs a number for each of {rows} rows, not shape {getattr(cached, name).shape}")
    if any(getattr(cached, name).ndim != 1 for name in ("settled", "write")):
        raise ValueError("settled and write are one-dimensional: rows in pages go launch by launch")
    if {getattr(cached, name).dtype for name in ("first", "last", "settled", "write", "positions")} != {mx.int32}:
        raise ValueError("first, last, settled, write and positions are int32")
    return width


def _vector(name: str, array: mx.array, size: int, dtype: mx.Dtype) -> None:
    if array.shape != (size,) or array.dtype != dtype:
        raise ValueError(f"{name} needs shape ({size},) in {dtype}, not {array.shape} {array.dtype}")


def _matrix(name: str, matrix: Packed, shape: tuple[int, int, int]) -> None:
    if (matrix.experts, matrix.n, matrix.k) != shape:
        raise ValueError(f"{name} needs {shape[0]} of {shape[1:]}, not {matrix.experts} of {(matrix.n, matrix.k)}")


def _one_dtype(*matrices: Packed) -> None:
    if len({matrix.scales.dtype for matrix in matrices}) > 1:
        raise ValueError(f"scales of one dtype are needed, not {[str(m.scales.dtype) for m in matrices]}")
