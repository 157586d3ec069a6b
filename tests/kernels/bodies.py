"""Kernels of one output from a line of Metal, in the simulator."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from labkit.kernels import simulator
from labkit.kernels.fused import RESIDUAL_RMS_NORM, residual_rms_norm_call
from labkit.kernels.signature import MetalText, make_launch

HEAD = (
    "uint i = thread_position_in_grid.x; uint t = thread_position_in_threadgroup.x; "
    "uint lane = thread_index_in_simdgroup;\n"
)


def launch(body, inputs, shape, dtype=mx.float32, *, grid=64, threadgroup=64, names=("x", "z"), header="", **options):
    """One output `y` of a body that sees inputs `x`, `z`."""
    call_keys = {"template", "init_value"} & set(options)
    call = {key: options.pop(key) for key in call_keys}
    atomic = options.pop("atomic_outputs", False)
    text = MetalText("body", names[: len(inputs)], ("y",), HEAD + body, header, atomic_outputs=atomic)
    call |= {
        "grid": (grid, 1, 1),
        "threadgroup": (threadgroup, 1, 1),
        "output_shapes": [shape],
        "output_dtypes": [dtype],
    }
    return simulator.run(text, make_launch(text, inputs=inputs, **call), **options)


def value(body, inputs, shape, dtype=mx.float32, **options):
    run = launch(body, inputs, shape, dtype, check=True, **options)
    assert run.clean, str(run)
    return np.array(run.outputs[0].astype(mx.float32))


def norm_runs(**options):
    mx.random.seed(0)
    x, residual = mx.random.normal((2, 200)), mx.random.normal((2, 200))
    call = residual_rms_norm_call(x, residual, mx.ones((200,)), 1e-6)
    return simulator.run(RESIDUAL_RMS_NORM.text, RESIDUAL_RMS_NORM.launch(**call), **options)
