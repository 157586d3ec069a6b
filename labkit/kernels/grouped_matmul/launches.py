"""The kernels of the experts' products, and the arguments of their calls."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import mlx.core as mx

from labkit.kernels.grouped_matmul import reference
from labkit.kernels.header import Header
from labkit.kernels.headers import TILES
from labkit.kernels.launch import Kernel
from labkit.kernels.quantized_matmul.launches import (
    check_form,
    check_tile,
    columns_of,
    row_tasks,
    row_unroll_for,
    split_for,
    stages_for,
    tile_kernels,
)
from labkit.kernels.quantized_matmul.packed import Packed
from labkit.kernels.routing.launches import ROUTING, check_choice

MOST_SIMDS = 20
"""Simdgroups of a threadgroup in the form "tensor": with 96 registers a thread they fit a multiprocessor."""

_FOLDER = Path(__file__).parent
_GATE_UP = ["x", "gate", "gate_scales", "gate_biases", "up", "up_scales", "up_biases"]
_DOWN = ["hidden", "down", "down_scales", "down_biases"]


def _row_kernels(
    name: str, inputs: list[str], outputs: list[str], slots: str, parts: int, oracle, header: Header = TILES
) -> dict[str, Kernel]:
    """A text over `FewRows` for one row of x and experts' weights in both forms. `slots`, `parts`: SLOTS, PARTS."""
    text = (_FOLDER / f"{name}.metal").read_text()
    forms = {
        "plain": f"FewRowsByLanes<T, S, 1, BITS, GROUP, K, N, true, {slots}, {parts}, SIMDS>",
        "tensor": f"OneRowByTensor<T, BITS, GROUP, K, N, true, {slots}, {parts}, SIMDS, UNROLL>",
    }
    return {
        form: Kernel(
            f"{name}_{form}", inputs, outputs, f"using FewRows = {rows};\n{text}", header=header, reference=oracle
        )
        for form, rows in forms.items()
    }


EXPERT_GATE_UP = tile_kernels(
    _FOLDER / "expert_gate_up.metal", [*_GATE_UP, "order", "block_map"], ["hidden"], True, reference.expert_gate_up
)
EXPERT_DOWN = tile_kernels(
    _FOLDER / "expert_down.metal", [*_DOWN, "order", "block_map", "weights"], ["products"], False, reference.expert_down
)
COMBINE_EXPERTS = Kernel.from_file(
    _FOLDER / "combine_experts.metal",
    ["products", "shared", "shared_factor", "TOKENS"],
    ["y"],
    reference=reference.combine_experts,
)
DECODE_GATE_UP = _row_kernels("decode_gate_up", [*_GATE_UP, "indices"], ["hidden"], "1", 2, reference.decode_gate_up)
CHOOSE_GATE_UP = _row_kernels(
    "choose_gate_up",
    [*_GATE_UP, "logits", "L"],
    ["hidden", "indices", "weights"],
    "1",
    2,
    reference.choose_gate_up,
    header=TILES.followed_by(ROUTING),
)
DECODE_DOWN = _row_kernels(
    "decode_down", [*_DOWN, "indices", "weights", "shared", "shared_factor"], ["y"], "TOPK", 1, reference.decode_down
)


def expert_gate_up_call(
    x: mx.array,
    gate: Packed,
    up: Packed,
    order: mx.array,
    block_map: mx.array,
    k: int,
    form: str = "plain",
    *,
    tile: int,
    stages: int | None = None,
) -> dict:
    """The arguments of `EXPERT_GATE_UP[form]`: hidden [T * k, N] in sorted order = silu(gate . x) (up . x).

    Args:
        x: [T, K]. gate, up: E experts of N x K. k: experts a token.
        order, block_map, tile: as in `labkit.kernels.routing.Groups`; the map must have been made for this tile.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _same_shape(gate, up)
    _check(x, gate, form, "x", up)
    _check_groups(order, block_map, x.shape[0] * k)
    if check_tile(form, tile) != tile:
        raise ValueError(f"form {form!r} has no tile of {tile} rows")
    return {
        "inputs": [x, *gate.arrays, *up.arrays, order, block_map],
        "template": [("T", x.dtype), *gate.template, ("TOPK", k), ("BM", tile), ("STAGES", stages or stages_for(tile))],
        "grid": (-(-gate.n // columns_of(form, paired=True)) * 128, block_map.shape[0], 1),
        "threadgroup": (128, 1, 1),
        "output_shapes": [(order.size, gate.n)],
        "output_dtypes": [x.dtype],
    }


def expert_down_call(
    hidden: mx.array,
    down: Packed,
    order: mx.array,
    block_map: mx.array,
    weights: mx.array,
    form: str = "plain",
    *,
    tile: int,
    stages: int | None = None,
) -> dict:
    """The arguments of `EXPERT_DOWN[form]`: products [T * k, N] by assignment, each times its routing weight.

    Args:
        hidden: [T * k, K] in sorted order. down: E experts of N x K. weights: [T, k], any float dtype.
        order, block_map, tile: as for `expert_gate_up_call`.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(hidden, down, form, "hidden")
    _check_groups(order, block_map, hidden.shape[0])
    if weights.size != hidden.shape[0]:
        raise ValueError(f"{hidden.shape[0]} assignments have as many weights, not {weights.shape}")
    if check_tile(form, tile) != tile:
        raise ValueError(f"form {form!r} has no tile of {tile} rows")
    return {
        "inputs": [hidden, *down.arrays, order, block_map, weights],
        "template": [("T", hidden.dtype), *down.template, ("BM", tile), ("STAGES", stages or stages_for(tile))],
        "grid": (-(-down.n // columns_of(form)) * 128, block_map.shape[0], 1),
        "threadgroup": (128, 1, 1),
        "output_shapes": [(hidden.shape[0], down.n)],
        "output_dtypes": [hidden.dtype],
    }


def combine_experts_call(products: mx.array, shared: mx.array | None = None, factor: mx.array | None = None) -> dict:
    """The arguments of `COMBINE_EXPERTS`: y [T, N] = sum of products [T, k, N] over k, plus factor [T] shared [T, N].

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if products.ndim != 3 or products.size == 0:
        raise ValueError(f"products are [T, k, N], at least one of them, not {products.shape}")
    tokens, k, n = products.shape
    shared, factor, has_shared = _shared(shared, factor, tokens, n, products.dtype)
    threads = -(-tokens * -(-n // 4) // 256) * 256
    return {
        "inputs": [products, shared, factor, tokens],
        "template": [("T", products.dtype), ("N", n), ("TOPK", k), ("SHARED", has_shared)],
        "grid": (threads, 1, 1),
        "threadgroup": (256, 1, 1),
        "output_shapes": [(tokens, n)],
        "output_dtypes": [products.dtype],
    }


def decode_gate_up_call(
    x: mx.array,
    gate: Packed,
    up: Packed,
    indices: mx.array,
    form: str = "plain",
    *,
    simds: int | None = None,
    unroll: int | None = None,
) -> dict:
    """The arguments of `DECODE_GATE_UP[form]`: hidden [T * k, N] by assignment = silu(gate . x) (up . x).

    Args:
        x: [T, K], a few tokens. gate, up: E experts of N x K. indices: [T, k] int32.
        simds, unroll: as for `few_rows_call`.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check_indices(indices, x.shape[0])
    call = _gate_up(x, gate, up, indices.shape[1], form, simds, unroll)
    return {
        **call,
        "inputs": [*call["inputs"], indices],
        "template": [*call["template"], ("TOPK", indices.shape[1])],
    }


def choose_gate_up_call(
    x: mx.array,
    gate: Packed,
    up: Packed,
    logits: mx.array,
    k: int,
    form: str = "plain",
    *,
    experts: int,
    renormalise: bool = True,
    shared: int = 0,
    simds: int | None = None,
    unroll: int | None = None,
) -> dict:
    """The arguments of `CHOOSE_GATE_UP[form]`: hidden as `DECODE_GATE_UP`, indices and weights as `choose_experts`.

    Args:
        x: [T, K], a few tokens. gate, up: experts + shared of N x K. logits: [T, L], one more than experts if shared.
        k, experts, renormalise, shared: as for `choose_experts`. simds, unroll: as for `decode_gate_up_call`.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    check_choice(logits, k, experts, shared)
    if logits.shape[0] != x.shape[0] or logits.dtype != mx.float32 or gate.experts != experts + shared:
        raise ValueError(
            f"logits are [{x.shape[0]}, L] float32 for {gate.experts} experts, {shared} of them shared, not "
            f"{logits.shape} {logits.dtype} for {experts}"
        )
    slots, tokens = k + shared, logits.shape[0]
    call = _gate_up(x, gate, up, slots, form, simds, unroll)
    (columns, rows, _), threads = call["grid"], call["threadgroup"][0]
    choice = [("E", experts), ("TOPK", k), ("SHARED", shared), ("RENORMALISE", renormalise)]
    return {
        **call,
        "inputs": [*call["inputs"], logits, logits.shape[1]],
        "template": [*call["template"], *choice],
        "grid": (columns + threads, rows, 1),
        "output_shapes": [*call["output_shapes"], (tokens, slots), (tokens, slots)],
        "output_dtypes": [x.dtype, mx.int32, mx.float32],
    }


def _gate_up(
    x: mx.array, gate: Packed, up: Packed, slots: int, form: str, simds: int | None, unroll: int | None
) -> dict:
    """What both calls for gate and up have in common; `slots`: experts of a token."""
    _same_shape(gate, up)
    _check(x, gate, form, "x", up)
    simds, unroll = _split(gate, 1, form, simds, unroll)
    columns = 8 if form == "tensor" else 16
    rows = x.shape[0] * slots
    return {
        "inputs": [x, *gate.arrays, *up.arrays],
        "template": [("T", x.dtype), *gate.template, ("SIMDS", simds)]
        + ([("UNROLL", unroll)] if form == "tensor" else []),
        "grid": (-(-gate.n // columns) * 32 * simds, rows, 1),
        "threadgroup": (32 * simds, 1, 1),
        "output_shapes": [(rows, gate.n)],
        "output_dtypes": [x.dtype],
    }


def _split(weights: Packed, slots: int, form: str, simds: int | None, unroll: int | None) -> tuple[int, int]:
    """Simdgroups of a threadgroup whose rows take the steps of `slots` experts, and steps each has in flight."""
    if form == "plain":
        chosen = split_for(slots * -(-weights.k * weights.bits // 512))
        return simds or chosen[0], unroll or chosen[1]
    # As many steps as the tensor core has columns for their groups, four at most, and a simdgroup for each such task.
    # One and eight tokens, forty launches in a graph of an H200 at 3fdbcda: gate and up take 5.4 and 29.3 us by 4 steps
    # each, 7.4 and 40.9 by 2 steps in twice as many simdgroups; down 4.1 and 16.2, and 4.2 and 25.1.
    unroll = unroll or row_unroll_for(weights)
    tasks = slots * row_tasks(weights, unroll)
    return simds or -(-tasks // -(-tasks // MOST_SIMDS)), unroll


def decode_down_call(
    hidden: mx.array,
    down: Packed,
    indices: mx.array,
    weights: mx.array,
    shared: mx.array | None = None,
    factor: mx.array | None = None,
    form: str = "plain",
    *,
    simds: int | None = None,
    unroll: int | None = None,
) -> dict:
    """The arguments of `DECODE_DOWN[form]`: y [T, N], the experts' products weighed and summed, and the shared expert.

    Args:
        hidden: [T * k, K] by assignment. down: E experts of N x K. indices: [T, k] int32. weights: [T, k], any float.
        shared: [T, N], times factor [T]. simds, unroll: as for `few_rows_call`, over the k experts as one row.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    _check(hidden, down, form, "hidden")
    tokens, k = _check_indices(indices, hidden.shape[0] // indices.shape[-1])
    if hidden.shape[0] != indices.size or weights.shape != indices.shape:
        raise ValueError(
            f"hidden and weights are for {indices.shape} assignments, not {hidden.shape} and {weights.shape}"
        )
    shared, factor, has_shared = _shared(shared, factor, tokens, down.n, hidden.dtype)
    simds, unroll = _split(down, k, form, simds, unroll)
    return {
        "inputs": [hidden, *down.arrays, indices, weights, shared, factor],
        "template": [("T", hidden.dtype), *down.template, ("TOPK", k), ("SHARED", has_shared), ("SIMDS", simds)]
        + ([("UNROLL", unroll)] if form == "tensor" else []),
        "grid": (-(-down.n // 16) * 32 * simds, tokens, 1),
        "threadgroup": (32 * simds, 1, 1),
        "output_shapes": [(tokens, down.n)],
        "output_dtypes": [hidden.dtype],
    }


@cache
def _nothing(dtype: mx.Dtype) -> mx.array:
    # Stands for what a kernel does not read. Computed: a pending array would be computed again in every compiled graph.
    nothing = mx.zeros((8,), dtype)
    mx.eval(nothing)
    return nothing


def _shared(
    shared: mx.array | None, factor: mx.array | None, tokens: int, n: int, dtype: mx.Dtype
) -> tuple[mx.array, mx.array, bool]:
    if shared is None:
        return _nothing(dtype), _nothing(dtype), False
    if shared.shape != (tokens, n) or shared.dtype != dtype:
        raise ValueError(f"the shared expert's output is {(tokens, n)} {dtype}, not {shared.shape} {shared.dtype}")
    if factor is None or factor.size != tokens:
        raise ValueError(f"the shared expert needs a factor for each of {tokens} tokens, not {factor}")
    return shared, factor if factor.ndim == 1 else factor.reshape(-1), True


def _same_shape(gate: Packed, up: Packed) -> None:
    if gate.template != up.template or gate.experts != up.experts:
        raise ValueError("gate and up need one shape, dtype, group size and number of bits")


def _check(x: mx.array, weights: Packed, form: str, name: str, *others: Packed) -> None:
    if x.ndim != 2 or x.shape[1] != weights.k or x.shape[0] == 0:
        raise ValueError(f"{name} has {weights.k} columns and at least one row for these weights, not shape {x.shape}")
    check_form(form, x, weights, *others)


def _check_groups(order: mx.array, block_map: mx.array, assignments: int) -> None:
    if order.shape != (assignments,) or order.dtype != mx.int32:
        raise ValueError(f"order is [{assignments}] int32, not {order.shape} {order.dtype}")
    if block_map.ndim != 2 or block_map.shape[1] != 4 or block_map.dtype != mx.int32:
        raise ValueError(f"the block map is [blocks, 4] int32, not {block_map.shape} {block_map.dtype}")


def _check_indices(indices: mx.array, tokens: int) -> tuple[int, int]:
    if indices.ndim != 2 or indices.shape[0] != tokens or indices.dtype != mx.int32:
        raise ValueError(f"indices are [{tokens}, k] int32, not {indices.shape} {indices.dtype}")
    return indices.shape
