"""The kernels of whole layers, and the arguments of their launches."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import mlx.core as mx

from labkit.kernels.attention.launches import ATTENTION
from labkit.kernels.attention.split import parts_for
from labkit.kernels.fused.launches import HEADS, ROUTER, frequencies
from labkit.kernels.gated_delta.recurrence import PACKED
from labkit.kernels.gated_delta.shapes import DELTA
from labkit.kernels.header import Header
from labkit.kernels.headers import TILES
from labkit.kernels.launch import Kernel
from labkit.kernels.persistent import reference
from labkit.kernels.persistent.arguments import SIMDS, Attention, Cached, Delta, Sparse
from labkit.kernels.persistent.checks import check_attention, check_delta, check_sparse
from labkit.kernels.persistent.words import Words
from labkit.kernels.quantized_matmul.packed import Packed
from labkit.kernels.routing.launches import ROUTING

_FOLDER = Path(__file__).parent
_TEXTS = ROUTER.followed_by(TILES, ROUTING, DELTA, HEADS, ATTENTION, Header.from_file(_FOLDER / "stages.h"))
_SPARSE = ["norm", "router", "router_scales", "router_biases"]
_SPARSE += [f"{name}{part}" for name in ("gate", "up", "down") for part in ("", "_scales", "_biases")]
_PROJECTIONS = ["in_w", "in_scales", "in_biases", "out_w", "out_scales", "out_biases", "input_norm"]
_DELTA = ["tail", "state", "conv", "a_log", "dt_bias", "head_norm"]
_HEADS = ["q_norm", "k_norm", "inverse_frequency", "positions", "keys", "values", "tail_keys", "tail_values"]
_HEADS += ["first", "last", "settled", "write", "scale", "COLUMNS", "PARTS"]

# What a tile, and a part of attention, need before the next one takes their memory, by form: lanes write a tile's sums
# without waiting for anybody, and leave a part together.
_WAITS = {
    "plain": ("{ threadgroup_barrier(mem_flags::mem_threadgroup); }", "{}"),
    "tensor": ("{}", "{ threadgroup_barrier(mem_flags::mem_threadgroup); }"),
}
_EXPERTS = (
    ("GateUp", "1, BITS, GROUP, D, I, true, 1, 2", "GATE_UNROLL"),
    ("Down", "1, DOWN_BITS, DOWN_GROUP, I, D, true, TOPK + SHARED, 1", "DOWN_UNROLL"),
)
_MIXER = (
    ("Inputs", "M, IN_BITS, IN_GROUP, D, IN_N, false, 1, 1", "IN_UNROLL"),
    ("Output", "M, OUT_BITS, OUT_GROUP, OUT_K, D, false, 1, 1", "OUT_UNROLL"),
)
_ATTEND = {
    "plain": "using Attend = AttendByLanes<T, HD, HQ / HKV, PACK, SIMDS, 4, true, true, 0>;",
    "tensor": "using Attend = AttendByTensor<T, HD, HQ / HKV, SIMDS, true, 0>;",
}


def _kernels(name: str, inputs: list[str], products: tuple, oracle, attends: bool = False) -> dict[str, Kernel]:
    """A text in both forms of its products. Its first line makes CUDA read what other threadgroups wrote."""
    made = {}
    for form, start, end in (("plain", "FewRowsByLanes<T, S", ""), ("tensor", "FewRowsByTensor<T", ", {}")):
        lines = [f"using {n} = {start}, {sizes}, SIMDS{end.format(unroll)}>;" for n, sizes, unroll in products]
        lines += [_ATTEND[form]] if attends else []
        source = "\n".join([*lines, (_FOLDER / f"{name}.metal").read_text()])
        names = zip(("reuse", "reuse_part"), _WAITS[form], strict=True)
        waits = "\n".join(f"//@provides {name}\nMETAL_FUNC void {name}() {body}" for name, body in names)
        header = Header.parse(f"#define LABKIT_COHERENT 1\n{waits}").followed_by(_TEXTS)
        made[form] = Kernel(f"{name}_{form}", inputs, ["words"], source, header=header, reference=oracle, resident=True)
    return made


SPARSE_HALF = _kernels("sparse_half", ["update", "stream", *_SPARSE, "eps"], _EXPERTS, reference.sparse_half)
LINEAR_LAYER = _kernels(
    "linear_layer",
    ["update", "stream", *_PROJECTIONS, *_DELTA, *_SPARSE, "eps"],
    (*_MIXER, *_EXPERTS),
    reference.linear_layer,
)
FULL_LAYER = _kernels(
    "full_layer",
    ["update", "stream", *_PROJECTIONS, *_HEADS, *_SPARSE, "eps"],
    (*_MIXER, *_EXPERTS),
    reference.full_layer,
    attends=True,
)


def unroll_for(k: int, bits: int, slots: int = 1, parts: int = 1) -> int:
    """Steps of 64 bytes that a simdgroup has on their way: all of a tile's, or two batches, within 24 KB in all."""
    steps = slots * -(-k * bits // 512)
    share = -(-steps // SIMDS)
    if share * parts <= 4:
        return share
    return 2 if parts == 1 and steps % (2 * SIMDS) == 0 else 1


@lru_cache
def sparse_words(rows: int, dim: int, scores: int, inner: tuple[int, int], dtype: mx.Dtype) -> Words:
    """The output of `SPARSE_HALF`; `inner`: experts of a token, and their width."""
    return Words(_sparse_parts(rows, dim, scores, inner, dtype))


@lru_cache
def linear_words(
    rows: int, dim: int, scores: int, inner: tuple[int, int], sizes: tuple, groups: int, dtype: mx.Dtype
) -> Words:
    """The output of `LINEAR_LAYER`; `sizes`: Hk, Hv, Dk, Dv and outputs of the input projection."""
    hk, hv, dk, dv, projected = sizes
    return Words(
        (
            *_sparse_parts(rows, dim, scores, inner, dtype),
            ("state", (rows, hv, dv, dk), mx.float32),
            ("tail", (rows, 3, 2 * hk * dk + hv * dv), dtype),
            *_mixer_parts(rows, dim, projected, hv * dv, groups, dtype),
        )
    )


@lru_cache
def full_words(
    rows: int, dim: int, scores: int, inner: tuple[int, int], sizes: tuple, groups: int, dtype: mx.Dtype
) -> Words:
    """The output of `FULL_LAYER`; `sizes`: Hq, Hkv, Dh, columns of the tail, parts, outputs of the input projection."""
    hq, hkv, width, columns, parts, projected = sizes
    return Words(
        (
            *_sparse_parts(rows, dim, scores, inner, dtype),
            ("tail_keys", (rows, hkv, columns, width), dtype),
            ("tail_values", (rows, hkv, columns, width), dtype),
            ("queries", (rows, hq, width), dtype),
            ("shares", (rows, hq, parts, width), mx.float32),
            ("stats", (rows, hq, parts, 2), mx.float32),
            *_mixer_parts(rows, dim, projected, hq * width, groups, dtype),
        )
    )


def _sparse_parts(rows: int, dim: int, scores: int, inner: tuple[int, int], dtype: mx.Dtype) -> tuple:
    return (
        ("hidden", (rows, dim), dtype),
        ("y", (rows, dim), dtype),
        ("normed", (rows, dim), dtype),
        ("logits", (rows, scores), mx.float32),
        ("inner", (rows, *inner), dtype),
    )


def _mixer_parts(rows: int, dim: int, projected: int, mixed: int, groups: int, dtype: mx.Dtype) -> tuple:
    return (
        ("sums", (rows, dim), dtype),
        ("projected", (rows, projected), dtype),
        ("mixed", (rows, mixed), dtype),
        ("added", (rows, dim), dtype),
        ("copies", (groups, rows, dim), dtype),
    )


def sparse_half_call(
    update: mx.array, stream: mx.array, sparse: Sparse, eps: float, form: str = "plain", *, groups: int
) -> dict:
    """The arguments of `SPARSE_HALF[form]` for `groups` threadgroups.

    Raises:
        ValueError: shapes, dtypes or sizes that do not fit.
    """
    rows, dim = check_sparse(update, stream, sparse, form)
    words = sparse_words(rows, dim, sparse.router.n, _inner(sparse), update.dtype)
    return _call(
        [update, stream, *_sparse_inputs(sparse), float(eps)],
        [("T", update.dtype), ("M", rows), ("D", dim), *_sparse_template(sparse, form)],
        words,
        groups,
    )


def linear_layer_call(
    update: mx.array,
    stream: mx.array,
    delta: Delta,
    tail: mx.array,
    state: mx.array,
    sparse: Sparse,
    eps: float,
    form: str = "plain",
    *,
    groups: int,
) -> dict:
    """The arguments of `LINEAR_LAYER[form]`; others as `sparse_half_call`. Raises ValueError likewise."""
    rows, dim = check_sparse(update, stream, sparse, form)
    conv = check_delta(delta, rows, dim, tail, state, sparse, form)
    (hk, hv), (dk, dv) = delta.heads, delta.dims
    sizes = (hk, hv, dk, dv, delta.inputs.n)
    words = linear_words(rows, dim, sparse.router.n, _inner(sparse), sizes, groups, update.dtype)
    channels, width = 2 * hk * dk + hv * dv, hv * dv
    template = [
        *(("T", update.dtype), ("M", rows), ("D", dim)),
        *(("HK", hk), ("HV", hv), ("DK", dk), ("DV", dv), ("LANES", PACKED.lanes), ("COLS", PACKED.columns)),
        *(("Z_AT", channels), ("A_AT", channels + width), ("B_AT", channels + width + hv)),
        *_mixer_template(delta.inputs, delta.output, form),
        *_sparse_template(sparse, form),
    ]
    return _call(
        [
            *(update, stream, *delta.inputs.arrays, *delta.output.arrays, delta.input_norm),
            *(tail, state, conv, delta.a_log, delta.dt_bias, delta.norm),
            *(*_sparse_inputs(sparse), float(eps)),
        ],
        template,
        words,
        groups,
    )


def full_layer_call(
    update: mx.array,
    stream: mx.array,
    attention: Attention,
    cached: Cached,
    sparse: Sparse,
    eps: float,
    form: str = "plain",
    *,
    groups: int,
) -> dict:
    """The arguments of `FULL_LAYER[form]`; others as `sparse_half_call`. Raises ValueError likewise."""
    rows, dim = check_sparse(update, stream, sparse, form)
    width = check_attention(attention, rows, dim, cached, sparse, form)
    hq, hkv = attention.heads
    buffered, columns = cached.keys.shape[2], cached.tail_keys.shape[2]
    parts = parts_for(rows, hkv, hq // hkv, buffered + columns)
    sizes = (hq, hkv, width, columns, parts, attention.inputs.n)
    words = full_words(rows, dim, sparse.router.n, _inner(sparse), sizes, groups, update.dtype)
    template = [
        *(("T", update.dtype), ("M", rows), ("D", dim)),
        *(("HQ", hq), ("HKV", hkv), ("HD", width), ("TAIL", columns), ("ROTARY", attention.rotary)),
        *([("PACK", min(4, hq // hkv))] if form == "plain" else []),
        *_mixer_template(attention.inputs, attention.output, form),
        *_sparse_template(sparse, form),
    ]
    return _call(
        [
            *(update, stream, *attention.inputs.arrays, *attention.output.arrays, attention.input_norm),
            *(attention.q_norm, attention.k_norm, frequencies(attention.rotary, attention.base)),
            *(cached.positions, cached.keys, cached.values, cached.tail_keys, cached.tail_values),
            *(cached.first, cached.last, cached.settled, cached.write, float(width**-0.5), buffered, parts),
            *(*_sparse_inputs(sparse), float(eps)),
        ],
        template,
        words,
        groups,
    )


def _call(inputs: list, template: list, words: Words, groups: int) -> dict:
    return {
        "inputs": inputs,
        "template": [*template, ("SIMDS", SIMDS), *words.template],
        "grid": (groups * 32 * SIMDS, 1, 1),
        "threadgroup": (32 * SIMDS, 1, 1),
        "output_shapes": [(words.size,)],
        "output_dtypes": [mx.uint32],
        "init_value": 0,
    }


def _inner(sparse: Sparse) -> tuple[int, int]:
    return sparse.top_k + sparse.shared, sparse.gate.n


def _sparse_inputs(sparse: Sparse) -> list[mx.array]:
    matrices = (sparse.router, sparse.gate, sparse.up, sparse.down)
    return [sparse.norm, *(array for matrix in matrices for array in matrix.arrays)]


def _sparse_template(sparse: Sparse, form: str) -> list:
    router, gate, down = sparse.router, sparse.gate, sparse.down
    unrolls = [
        ("GATE_UNROLL", unroll_for(gate.k, gate.bits, parts=2)),
        ("DOWN_UNROLL", unroll_for(down.k, down.bits, sparse.top_k + sparse.shared)),
    ]
    return [
        *(("S", gate.scales.dtype), ("R", router.scales.dtype)),
        *(("E", sparse.experts), ("TOPK", sparse.top_k), ("SHARED", sparse.shared)),
        *(("RENORMALISE", sparse.renormalise), ("SCORES", router.n)),
        *(("ROUTER_BITS", router.bits), ("ROUTER_GROUP", router.group_size)),
        *(("I", gate.n), ("BITS", gate.bits), ("GROUP", gate.group_size)),
        *(("DOWN_BITS", down.bits), ("DOWN_GROUP", down.group_size)),
        *(unrolls if form == "tensor" else []),
    ]


def _mixer_template(inputs: Packed, output: Packed, form: str) -> list:
    unrolls = [("IN_UNROLL", unroll_for(inputs.k, inputs.bits)), ("OUT_UNROLL", unroll_for(output.k, output.bits))]
    return [
        *(("IN_N", inputs.n), ("IN_BITS", inputs.bits), ("IN_GROUP", inputs.group_size)),
        *(("OUT_K", output.k), ("OUT_BITS", output.bits), ("OUT_GROUP", output.group_size)),
        *(unrolls if form == "tensor" else []),
    ]
