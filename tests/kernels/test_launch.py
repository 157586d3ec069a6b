"""`Kernel`: what a call accepts and refuses, and where it runs."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from labkit.kernels import Kernel, default_target, targets_for, use_target

BODY = "uint i = thread_position_in_grid.x; y[i] = x[i] * scale;"
CALL = {
    "inputs": [mx.arange(64, dtype=mx.float32), 2.0],
    "grid": (64, 1, 1),
    "threadgroup": (32, 1, 1),
    "output_shapes": [(64,)],
    "output_dtypes": [mx.float32],
}


def kernel(**options) -> Kernel:
    return Kernel("scaled", ["x", "scale"], ["y"], BODY, **options)


def test_simulator_runs_the_text():
    (y,) = kernel()(**CALL, target="simulator")
    assert mx.array_equal(y, 2 * mx.arange(64))


def test_every_registered_target_gives_the_same():
    both = kernel(
        reference=lambda launch: [launch.inputs[0] * launch.inputs[1]], native=lambda launch: [launch.inputs[0] * 2]
    )
    for target in ("simulator", "reference", "native"):
        assert target in targets_for(both)
        assert mx.array_equal(both(**CALL, target=target)[0], 2 * mx.arange(64))


def test_default_target_prefers_what_is_fast_on_a_cpu():
    if mx.default_device().type == mx.gpu:
        pytest.skip("MLX computes on a GPU here")
    function = lambda launch: [launch.inputs[0]]
    assert default_target(kernel()) == "simulator"
    assert default_target(kernel(reference=function)) == "reference"
    assert default_target(kernel(reference=function, native=function)) == "native"


def test_use_target_applies_inside_and_can_be_overruled():
    three = kernel(reference=lambda launch: [mx.full((64,), 3.0)])
    with use_target("reference"):
        assert three(**CALL)[0][0].item() == 3
        assert three(**CALL, target="simulator")[0][1].item() == 2
    with pytest.raises(ValueError, match="no kernel target 'fpga'; there are metal"), use_target("fpga"):
        pass


def test_reference_is_rounded_once():
    half = kernel(reference=lambda launch: [launch.inputs[0].astype(mx.float32) / 3])
    call = CALL | {"output_dtypes": [mx.float16]}
    assert half(**call, target="reference")[0].dtype == mx.float16


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"inputs": [mx.zeros((64,))]}, ValueError, r"1 inputs given for the 2 input_names \['x', 'scale'\]"),
        ({"output_shapes": []}, ValueError, "0 output_shapes given"),
        ({"output_dtypes": [mx.float32] * 2}, ValueError, "2 output_dtypes given"),
        ({"grid": (64, 1)}, ValueError, "grid needs three positive sizes"),
        ({"threadgroup": (0, 1, 1)}, ValueError, "threadgroup needs three positive sizes"),
        ({"template": [("T", 1.5)]}, TypeError, "template argument T is 1.5"),
        ({"template": [("T", [1])]}, TypeError, r"template argument T is \[1\]"),
        ({"inputs": [mx.zeros((64,)), "two"]}, TypeError, "not str: 'two'"),
        ({"output_dtypes": [mx.complex64]}, TypeError, "no Metal type for output dtype"),
        ({"inputs": [mx.zeros((64,), mx.complex64), 1]}, TypeError, "no Metal type for input x"),
        ({"target": "native"}, RuntimeError, "no native function"),
        ({"target": "reference"}, RuntimeError, "no reference"),
    ],
)
def test_calls_that_do_not_fit(change, error, message):
    with pytest.raises(error, match=message):
        kernel()(**({"target": "simulator"} | CALL | change))


def test_a_call_that_fitted_does_not_excuse_the_next():
    """What was checked is remembered by value, each kernel for itself."""
    once = kernel()
    for _ in range(2):
        once.launch(**CALL)
        for change in ({"grid": (0, 1, 1)}, {"template": [("T", 1.5)]}, {"output_shapes": [(64,)] * 2}):
            with pytest.raises((ValueError, TypeError)):
                once.launch(**CALL | change)
    with pytest.raises(ValueError, match="1 output_shapes given for the 2"):
        Kernel("scaled", ["x", "scale"], ["y", "z"], BODY).launch(**CALL)


def test_numbers_keep_their_type_and_sign():
    """Scalar arrays are kept between calls; equal numbers of different types or signs must not meet."""
    numbers = [1, 1.0, True, 0, 0.0, -0.0, False, 1]
    arrays = [kernel().launch(**CALL | {"inputs": [CALL["inputs"][0], number]}).inputs[1] for number in numbers]
    kinds = {bool: mx.bool_, int: mx.int32, float: mx.float32}
    assert [a.dtype for a in arrays] == [kinds[type(n)] for n in numbers]
    assert [str(a.item()) for a in arrays] == [str(n) for n in numbers]
    assert kernel().launch(**CALL | {"inputs": [CALL["inputs"][0], np.float64(0.5)]}).numbers == (None, 0.5)


def test_missing_devices_say_so():
    if mx.default_device().type == mx.gpu:
        pytest.skip("MLX has a GPU here")
    with pytest.raises(RuntimeError, match="cannot run on target 'metal': MLX has no Metal device"):
        kernel()(**CALL, target="metal")
    with pytest.raises(RuntimeError, match="no CUDA device"):
        kernel()(**CALL, target="cuda")


def test_names_must_be_identifiers_and_distinct():
    with pytest.raises(ValueError, match="identifier"):
        Kernel("not a name", ["x"], ["y"], "")
    with pytest.raises(ValueError, match=r"twice: \['x'\]"):
        Kernel("double", ["x"], ["x"], "")


def test_importing_the_kernels_needs_no_other_package_than_mlx_and_numpy():
    """They run from a source tree on machines that have little else."""
    import subprocess
    import sys

    code = (
        "import sys; import labkit.kernels, labkit.kernels.registry as r; r.all_entries(); "
        "print([m for m in 'psutil typer rich matplotlib elftools mlx_lm'.split() if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
