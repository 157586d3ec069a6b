"""Does this GPU compute what all kernels here stand on? A virtual machine's or an old Mac's may not."""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.launch import Kernel

PROBE = Kernel(
    "probe",
    ["x"],
    ["y"],
    """
uint lane = thread_index_in_simdgroup;
simdgroup_float8x8 matrix, product = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
simdgroup_load(matrix, x, 8);
simdgroup_multiply_accumulate(product, matrix, matrix, product);
simdgroup_store(product, y, 8);
y[64 + lane] = simd_sum(x[lane]);
y[96 + lane] = simd_shuffle_xor(x[lane], 1);
""",
)
"""x [64] float32 -> y [128]: x as an 8 x 8 matrix times itself; the sum of its first 32 values, in each lane; these 32
values, neighbours exchanged."""


def wrong(target: str | None = None) -> str:
    """What this GPU, or `target`, computes wrongly or not at all; "" if nothing."""
    x = mx.arange(64, dtype=mx.float32) % 7 - 3
    call = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(128,)], "output_dtypes": [mx.float32]}
    try:
        (y,) = PROBE(inputs=[x], target=target, **call)
        mx.eval(y)
    except (RuntimeError, ValueError) as error:  # the compiler, or the launch
        return str(error)
    with mx.stream(mx.cpu):
        matrix = x.reshape(8, 8)
        parts = {
            "products of 8 x 8 matrices": (y[:64], (matrix @ matrix).reshape(-1)),
            "sums over a simdgroup": (y[64:96], mx.broadcast_to(x[:32].sum(), (32,))),
            "shuffles in a simdgroup": (y[96:], x[:32].reshape(16, 2)[:, ::-1].reshape(-1)),
        }
        return ", ".join(name for name, (got, want) in parts.items() if not mx.array_equal(got, want).item())
