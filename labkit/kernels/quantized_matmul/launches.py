"""The kernels of the quantised product, and the arguments of their calls."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from labkit.kernels.header import Header
from labkit.kernels.headers import TILES
from labkit.kernels.launch import Kernel
from labkit.kernels.quantized_matmul import native, reference
from labkit.kernels.quantized_matmul.packed import Packed, forms

FEW = 8
"""Rows of x that the kernels for few rows take."""

_FOLDER = Path(__file__).parent


def tile_kernels(
    path: Path, inputs: list[str], outputs: list[str], paired: bool, oracle, native=None
) -> dict[str, Kernel]:
    """A text over `Tile` in both forms, by name of the form."""
    arguments = f"<T, S, BITS, GROUP, K, N, BM, STAGES, {str(paired).lower()}>"
    return {
        form: Kernel(
            f"{path.stem}_{form}",
            inputs,
            outputs,
            f"using Tile = {tile}{arguments};\n{path.read_text()}",
            header=TILES,
            reference=oracle,
            native=native,
        )
        for form, tile in (("plain", "TileBySimdgroup"), ("tensor", "TileByTensor"))
    }


def row_kernels(
    path: Path,
    inputs: list[str],
    outputs: list[str],
    parts: str,
    oracle,
    native=None,
    header: Header = TILES,
    where: str = "",
) -> dict[str, Kernel]:
    """A text over `FewRows` for M rows of x, in the forms "plain" and "tensor". `parts`: its PARTS, as a word of the
    text; `header`: `TILES`, with what else it stands on; `where`: where the rows of x lie, by its name in `few_rows.h`,
    if not in the device's memory."""
    lies = where and f", {where}<T>"
    return {
        form: Kernel(
            f"{path.stem}_{form}",
            inputs,
            outputs,
            f"using FewRows = {rows}{lies}>;\n{path.read_text()}",
            header=header,
            reference=oracle,
            native=native,
        )
        for form, rows in (
            ("plain", f"FewRowsByLanes<T, S, M, BITS, GROUP, K, N, false, 1, {parts}, SIMDS"),
            ("tensor", f"FewRowsByTensor<T, M, BITS, GROUP, K, N, false, 1, {parts}, SIMDS, UNROLL"),
        )
    }


_INPUTS = ["x", "w", "scales", "biases"]
FEW_ROWS = row_kernels(_FOLDER / "few_rows.metal", _INPUTS, ["y"], "PARTS", reference.quantized_matmul, native.few_rows)
FEW_ROWS["row"] = Kernel(
    "one_row",
    _INPUTS,
    ["y"],
    "using FewRows = OneRowByTensor<T, BITS, GROUP, K, N, false, 1, PARTS, SIMDS, UNROLL>;\n"
    + (_FOLDER / "few_rows.metal").read_text(),
    header=TILES,
    reference=reference.quantized_matmul,
)
MANY_ROWS = tile_kernels(
    _FOLDER / "many_rows.metal", [*_INPUTS, "M"], ["y"], False, reference.quantized_matmul, native.many_rows
)


def split_for(steps: int) -> tuple[int, int]:
    """Simdgroups of a threadgroup whose 16 rows take `steps` steps of 64 bytes each, and steps each has in flight, for
    the form "plain".

    K = 2048 on an H200 (data/measured/h200_quantized_matmul.json), 4 simdgroups by 4 steps against 8 by 2: one row of N
    = 12288 11.1 and 11.7 us, of N = 248320 107 and 129, four rows of N = 12288 13.8 and 16.2.
    """
    simds = next((simds for simds in (2, 4) if steps <= 4 * simds), 8)
    return simds, min(4, -(-steps // simds))


TENSOR_STEPS = 16
"""Steps of 64 bytes of 16 rows that a threadgroup of the form "tensor" has in flight."""


WIDE_SIMDS = 16
"""Simdgroups of a threadgroup where few would leave most of a multiprocessor idle, or their many rows wait."""

ONE_WAVE = 132
"""Threadgroups that an H200 has multiprocessors for."""


def tensor_split_for(steps: int, parts: int = 1, *, rows: int = 1, tiles: int | None = None) -> tuple[int, int]:
    """As `split_for`, for the form "tensor": one row of N = 12288 takes 7.8 us alone (data/measured/h200_targets.json).

    All steps at once where they fit, in few simdgroups; else two batches, the next one on its way while one is used,
    in as many simdgroups as share the steps evenly. Many simdgroups where there are rows to be multiplied meanwhile,
    or so few tiles that each has a multiprocessor for itself. In one graph of an H200's over 40 layers' weights, us a
    launch (data/measured/h200_step_forms.json): K = 4096, N = 2048, one row, 6.9 by 8 simdgroups of 1 step, 5.0 by 16
    of 2; eight rows 12.4, and 9.0 by 16 of 1; K = 2048, N = 12352, eight rows 19.0 by 4 of 4, 15.6 by 16 of 1.

    Args:
        rows: of x. tiles: of 16 columns, where a threadgroup has one each.
    """
    if parts == 1 and steps >= WIDE_SIMDS and rows > 4:
        return WIDE_SIMDS, 1
    if parts == 1 and steps >= 2 * WIDE_SIMDS and tiles is not None and tiles <= ONE_WAVE:
        return WIDE_SIMDS, 2
    most = TENSOR_STEPS // parts
    if steps <= most:
        simds = 2 if steps <= 4 else 4
        return simds, -(-steps // simds)
    counts = [n for n in (8, 6, 4) if 2 * n <= most]
    simds = next((n for n in counts if steps % n == 0), counts[0])
    return simds, next((u for u in range(most // (2 * simds), 0, -1) if steps % (simds * u) == 0), 1)


def row_unroll_for(weights: Packed) -> int:
    """Steps of a task of the form "row": four at most, and as many as the tensor core has columns for their groups."""
    return min(4, -(-weights.k * weights.bits // 512), weights.group_size * weights.bits // 64)


def row_tasks(weights: Packed, unroll: int | None = None) -> int:
    """Tasks of `unroll` steps, by default `row_unroll_for`'s, that 16 rows of weights are cut into."""
    return -(-weights.k * weights.bits // (512 * (unroll or row_unroll_for(weights))))


def few_rows_form(rows: int, x: mx.array, weights: Packed, target: str | None) -> str:
    """The form of `FEW_ROWS` for some rows like x on a target.

    One row on an H200, launches of one form in a graph over 480 MB of matrices, at 3ecf24a: K = 2048, N = 248320 takes
    68 us by reads that all stand in front of the products and 95 in form "tensor", N = 12288 6.5 and 7.3; K = 4096, N =
    2048 3.9 and 4.5.
    """
    if target != "cuda" or "tensor" not in forms(x, weights):
        return "plain"
    return "row" if rows == 1 else "tensor"


def few_rows_call(
    x: mx.array,
    weights: Packed,
    form: str = "plain",
    *,
    parts: int = 1,
    simds: int | None = None,
    unroll: int | None = None,
    dtype: mx.Dtype | None = None,
) -> dict:
    """The arguments of `FEW_ROWS[form]` for x [M, K], M at most 8, and 1 in form "row".

    Args:
        dtype: of the products, x's or float32.
        parts: tiles of 16 columns a threadgroup computes, one in form "row". simds: simdgroups of a threadgroup, up to
            16. unroll: steps of 64 bytes that each simdgroup has in flight (forms "tensor" and "row").

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    m = _rows(x, weights, "tensor" if form == "row" else form)
    if m > FEW:
        raise ValueError(f"at most {FEW} rows, not {m}: use many_rows_call")
    if form == "row" and (m, parts) != (1, 1):
        raise ValueError(f"form 'row' has one row and one part, not {m} and {parts}: take 'tensor'")
    steps = -(-weights.k * weights.bits // 512)
    tiles = -(-weights.n // 16)
    if form == "row":
        unroll = unroll or row_unroll_for(weights)
        tasks = row_tasks(weights, unroll)
        chosen = -(-tasks // -(-tasks // WIDE_SIMDS)), unroll
    else:
        chosen = split_for(steps) if form == "plain" else tensor_split_for(steps, parts, rows=m, tiles=tiles)
    simds, unroll = simds or chosen[0], unroll or chosen[1]
    return {
        "inputs": [x, *weights.arrays],
        "template": [("T", x.dtype), *weights.template, ("M", m), ("PARTS", parts), ("SIMDS", simds)]
        + ([("UNROLL", unroll)] if form != "plain" else []),
        "grid": (-(-weights.n // (16 * parts)) * 32 * simds, 1, 1),
        "threadgroup": (32 * simds, 1, 1),
        "output_shapes": [(m, weights.n)],
        "output_dtypes": [result_dtype(x, dtype)],
    }


def columns_of(form: str, paired: bool = False) -> int:
    """Output columns of a tile: 128 by tensor cores, 64 by simdgroup matrices; half where gate and up share it."""
    return (128 if form == "tensor" else 64) // (2 if paired else 1)


def stages_for(tile: int) -> int:
    """Batches of copies in flight: what 32 KB of threadgroup memory hold."""
    return 3 if tile > 64 else 4


def tile_for(rows: int) -> int:
    """Rows of a tile: the smallest that holds them all, at most 64.

    H200, N = 12288, K = 2048 (data/measured/h200_quantized_matmul.json): 512 rows took 156 us in tiles of 64, 157 of
    128 and 194 of 32; 4,096 rows 983, 1,048 and 1,331.
    """
    return next((tile for tile in (16, 32) if rows <= tile), 64)


def many_rows_call(
    x: mx.array,
    weights: Packed,
    form: str = "plain",
    *,
    tile: int | None = None,
    stages: int | None = None,
    dtype: mx.Dtype | None = None,
) -> dict:
    """The arguments of `MANY_ROWS[form]` for x [M, K].

    Args:
        dtype: of the products, x's or float32.
        tile: rows of a tile: 16, 32, 64, or 128 (form "tensor"). stages: batches of copies in flight (form "tensor").

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    m = _rows(x, weights, form)
    tile = check_tile(form, tile or tile_for(m))
    return {
        "inputs": [x, *weights.arrays, m],
        "template": [("T", x.dtype), *weights.template, ("BM", tile), ("STAGES", stages or stages_for(tile))],
        "grid": (-(-weights.n // columns_of(form)) * 128, -(-m // tile), 1),
        "threadgroup": (128, 1, 1),
        "output_shapes": [(m, weights.n)],
        "output_dtypes": [result_dtype(x, dtype)],
    }


def result_dtype(x: mx.array, dtype: mx.Dtype | None) -> mx.Dtype:
    """What a product of x is stored as: x's dtype, or float32, as its sums are.

    Raises:
        ValueError: another dtype.
    """
    dtype = x.dtype if dtype is None else dtype
    if dtype not in (x.dtype, mx.float32):
        raise ValueError(f"products of {x.dtype} are stored as {x.dtype} or float32, not {dtype}")
    return dtype


def check_tile(form: str, tile: int) -> int:
    """A number of rows that a form has tiles of. Simdgroup matrices stop at 64: their tiles live in 32 KB.

    Raises:
        ValueError: no such tile.
    """
    if form == "plain":
        tile = min(tile, 64)
    if tile not in (16, 32, 64, 128):
        raise ValueError(f"tiles have 16, 32, 64 or 128 rows, not {tile}")
    return tile


def _rows(x: mx.array, weights: Packed, form: str) -> int:
    if weights.w.ndim != 2:
        raise ValueError(f"one matrix is needed, not {weights.experts} experts: see labkit.kernels.grouped_matmul")
    if x.ndim != 2 or x.shape[1] != weights.k or x.shape[0] == 0:
        raise ValueError(f"x has {weights.k} columns and at least one row for these weights, not shape {x.shape}")
    check_form(form, x, weights)
    return x.shape[0]


def check_form(form: str, x: mx.array, *weights: Packed) -> None:
    """Raises ValueError if a form cannot multiply x by these weights."""
    if form not in ("plain", "tensor"):
        raise ValueError(f"the forms are 'plain' and 'tensor', not {form!r}")
    if form not in forms(x, *weights):
        dtypes = ", ".join(str(p.scales.dtype) for p in weights)
        raise ValueError(f"form 'tensor' needs one 16-bit float dtype, not x of {x.dtype} and scales of {dtypes}")
    if x.dtype not in (mx.float32, mx.float16, mx.bfloat16):
        raise ValueError(f"x is float32, float16 or bfloat16, not {x.dtype}")
    if small := [p.w.shape for p in weights if not p.fits_kernels]:
        raise ValueError(f"weights of {small[0]} are smaller than any kernel takes; use mx.quantized_matmul")
