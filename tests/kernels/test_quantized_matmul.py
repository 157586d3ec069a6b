"""What the gates do not show of the quantised product: the public operation, its choices, which bits depend on what."""

import mlx.core as mx
import numpy as np
import pytest

from labkit.kernels.quantized_matmul import (
    FEW_ROWS,
    MANY_ROWS,
    Packed,
    choose_variant,
    few_rows_form,
    native,
    quantized_matmul,
)
from labkit.kernels.quantized_matmul.gates import random_packed
from labkit.kernels.quantized_matmul.launches import few_rows_call, many_rows_call, split_for, tile_for

N, K = 48, 256


@pytest.fixture(scope="module")
def weights():
    mx.random.seed(0)
    return random_packed(N, K, mx.bfloat16)


def rows(m, dtype=mx.bfloat16, key=1):
    return mx.random.normal((m, K), key=mx.random.key(key)).astype(dtype)


def simulate(kernels, call_of, form, x, weights, **options):
    return kernels[form](**call_of(x, weights, form, **options), target="simulator")[0]


def exact(x, weights):
    return x.astype(mx.float32) @ weights.dequantize().T


@pytest.mark.parametrize("variant", ["few_rows", "many_rows", "dequantize", "mlx"])
def test_every_variant_gives_the_product_in_the_shape_of_x(variant, weights):
    x = rows(6).reshape(2, 3, K)
    y = quantized_matmul(x, weights, variant=variant, target="simulator")
    assert (y.shape, y.dtype) == ((2, 3, N), x.dtype)
    want = exact(x, weights)
    # MLX's bf16 product on a CPU keeps bf16 sums; the kernels keep fp32.
    bound = 3e-2 if variant in ("dequantize", "mlx") else 6e-3
    assert mx.abs(y.astype(mx.float32) - want).max().item() <= bound * mx.abs(want).max().item()


@pytest.mark.parametrize("target", ["simulator", "reference", None])
@pytest.mark.parametrize("variant", ["few_rows", "many_rows", "dequantize", "mlx", None])
def test_a_float32_result_of_16_bits_is_not_rounded(variant, target, weights):
    x = rows(6).reshape(2, 3, K)
    y = quantized_matmul(x, weights, variant=variant, dtype=mx.float32, target=target)
    want = exact(x, weights)
    # The tile multiplies weights of x's dtype: it is exact for those.
    if (variant, target) == ("many_rows", "simulator"):
        want = x.astype(mx.float32) @ weights.dequantize(mx.bfloat16).astype(mx.float32).T
    assert (y.shape, y.dtype) == ((2, 3, N), mx.float32)
    assert mx.abs(y - want).max().item() <= 1e-5 * mx.abs(want).max().item()


@pytest.mark.parametrize("form", ["plain", "tensor"])
@pytest.mark.parametrize(("kernels", "call_of"), [(FEW_ROWS, few_rows_call), (MANY_ROWS, many_rows_call)])
def test_a_float32_result_rounds_to_the_one_of_16_bits(form, kernels, call_of, weights):
    x = rows(5)
    wide = simulate(kernels, call_of, form, x, weights, dtype=mx.float32)
    narrow = simulate(kernels, call_of, form, x, weights)
    assert wide.dtype == mx.float32
    assert not mx.array_equal(wide, narrow.astype(mx.float32)).item()
    assert mx.array_equal(wide.astype(mx.bfloat16), narrow).item()


@pytest.mark.parametrize(("form", "count"), [("plain", 3), ("tensor", 3), ("row", 1)])
def test_few_rows_rounds_only_its_result(form, count, weights):
    x = rows(count)
    want = exact(x, weights)
    got = simulate(FEW_ROWS, few_rows_call, form, x, weights).astype(mx.float32)
    # Half a unit of bf16 in each value, and the fp32 sums' own error beside it.
    assert mx.all(mx.abs(got - want) <= 2**-8 * mx.abs(want) + 1e-4).item()


@pytest.mark.parametrize("form", ["plain", "tensor"])
def test_a_row_has_the_same_bits_whatever_rows_stand_beside_it(form, weights):
    x = rows(5)
    together = simulate(FEW_ROWS, few_rows_call, form, x, weights)
    alone = mx.concatenate([simulate(FEW_ROWS, few_rows_call, form, x[i : i + 1], weights) for i in range(5)])
    assert mx.array_equal(together, alone).item()


@pytest.mark.parametrize("form", ["plain", "tensor"])
def test_the_tile_changes_no_bit(form, weights):
    x = rows(40)
    results = [simulate(MANY_ROWS, many_rows_call, form, x, weights, tile=tile) for tile in (16, 32, 64)]
    assert all(mx.array_equal(results[0], other).item() for other in results[1:])


def test_a_splitting_over_simdgroups_stays_within_rounding(weights):
    x = rows(1)
    want = exact(x, weights)
    for options in ({"simds": 2, "unroll": 1}, {"simds": 4, "unroll": 3}, {"simds": 8, "unroll": 2}):
        got = simulate(FEW_ROWS, few_rows_call, "tensor", x, weights, **options).astype(mx.float32)
        assert mx.all(mx.abs(got - want) <= 2**-8 * mx.abs(want) + 1e-4).item(), options


@pytest.mark.parametrize("options", [{"simds": 1}, {"simds": 3}, {"simds": 4}])
def test_a_lone_row_in_other_tasks_stays_within_rounding(options, weights):
    """Four tasks of one step: all in one simdgroup, two in one of three, one in each."""
    x = rows(1)
    want = exact(x, weights)
    got = simulate(FEW_ROWS, few_rows_call, "row", x, weights, unroll=1, **options).astype(mx.float32)
    assert mx.all(mx.abs(got - want) <= 2**-8 * mx.abs(want) + 1e-4).item()


def test_the_form_of_few_rows(weights):
    x = rows(1)
    assert [few_rows_form(n, x, weights, where) for n, where in ((1, "cuda"), (2, "cuda"), (1, "metal"))] == [
        "row",
        "tensor",
        "plain",
    ]
    assert few_rows_form(1, x.astype(mx.float32), weights, "cuda") == "plain"


@pytest.mark.parametrize(("bits", "group", "k"), [(4, 32, 96), (4, 64, 192), (4, 128, 512), (8, 32, 96), (8, 128, 384)])
@pytest.mark.parametrize("variant", ["few_rows", "many_rows"])
def test_the_cpus_own_functions(variant, bits, group, k, monkeypatch):
    monkeypatch.setattr(native, "OUTPUTS", 7)  # of a thread's task: the last is smaller
    monkeypatch.setattr(native, "PARALLEL_FROM", 0)
    mx.random.seed(bits + group)
    packed = random_packed(30, k, mx.float32, bits, group)
    x = mx.random.normal((3, k))
    got = quantized_matmul(x, packed, variant=variant, target="native")
    np.testing.assert_allclose(np.array(got), np.array(exact(x, packed)), rtol=1e-5, atol=1e-4)
    for rows_ in (1, 2):  # no row depends on those beside it
        part = quantized_matmul(x[:rows_], packed, variant=variant, target="native")
        assert mx.array_equal(part, got[:rows_])


def test_a_cpu_reads_weights_where_they_are():
    packed = random_packed(32, 256, mx.float32)
    for seen, array in zip(packed.host_arrays, packed.arrays, strict=True):
        assert np.shares_memory(seen, np.array(array, copy=False))
    assert packed.host_addresses == tuple(array.ctypes.data for array in packed.host_arrays)


def test_scales_of_another_dtype_than_x(weights):
    x = rows(2, mx.float32)
    got = quantized_matmul(x, weights, variant="few_rows", target="simulator")
    assert got.dtype == mx.float32
    np.testing.assert_allclose(np.array(got), np.array(exact(x, weights)), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("rows_", "dtype", "target", "expected"),
    [
        (1, mx.bfloat16, "cuda", "mlx"),
        (7, mx.bfloat16, "cuda", "few_rows"),
        (8, mx.bfloat16, "cuda", "mlx"),
        (9, mx.bfloat16, "cuda", "many_rows"),
        (4096, mx.bfloat16, "cuda", "dequantize"),
        (100, mx.float32, "cuda", "mlx"),
        (1, mx.bfloat16, "metal", "mlx"),
        (4, mx.bfloat16, "metal", "few_rows"),
        (512, mx.bfloat16, "metal", "mlx"),
        (1, mx.bfloat16, None, "few_rows"),
        (64, mx.bfloat16, None, "many_rows"),
        (512, mx.bfloat16, "simulator", "many_rows"),
    ],
)
def test_the_choice_of_a_variant(rows_, dtype, target, expected, weights):
    assert choose_variant(rows_, mx.zeros((1, K), dtype), weights, target) == expected


@pytest.mark.parametrize("target", ["cuda", "metal"])
@pytest.mark.parametrize("count", [1, 8, 9, 4096])
def test_a_float32_result_of_16_bits_is_left_to_our_kernels(count, target, weights):
    """MLX's product would round it."""
    expected = "few_rows" if count <= 8 else "many_rows"
    assert choose_variant(count, rows(2), weights, target, mx.float32) == expected
    own = mx.zeros((2, K), mx.float32)
    assert choose_variant(count, own, weights, target, mx.float32) == choose_variant(count, own, weights, target)


def test_one_row_of_a_large_matrix_takes_few_rows_on_cuda():
    n, k = 12288, 2048
    groups = mx.zeros((n, k // 64), mx.bfloat16)
    large = Packed(mx.zeros((n, k // 8), mx.uint32), groups, groups)
    assert choose_variant(1, mx.zeros((1, k), mx.bfloat16), large, "cuda") == "few_rows"


def test_weights_too_small_for_a_kernel_go_to_mlx():
    small = random_packed(2, 64, mx.float32)
    assert choose_variant(1, mx.zeros((1, 64)), small, "cuda") == "mlx"
    with pytest.raises(ValueError, match=r"mx\.quantized_matmul"):
        few_rows_call(mx.zeros((1, 64)), small)


def test_steps_are_shared_out():
    for steps in range(1, 300):
        simds, unroll = split_for(steps)
        assert simds in (2, 4, 8)
        assert 1 <= unroll <= 4
        assert steps > 32 or steps <= simds * unroll  # all in flight at once
    assert [tile_for(m) for m in (1, 16, 17, 64, 65, 5000)] == [16, 16, 32, 64, 64, 64]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: quantized_matmul(mx.zeros((2, 100)), w), "256 columns"),
        (lambda w: quantized_matmul(mx.zeros((0, K)), w), "at least one row"),
        (lambda w: quantized_matmul(mx.zeros((1, K)), w, variant="fast"), "'fast'"),
        (lambda w: quantized_matmul(mx.zeros((1, K)), w, dtype=mx.bfloat16), "not mlx.core.bfloat16"),
        (lambda w: many_rows_call(mx.zeros((9, K)), w, dtype=mx.float16), "not mlx.core.float16"),
        (lambda w: few_rows_call(mx.zeros((9, K)), w), "at most 8 rows"),
        (lambda w: few_rows_call(mx.zeros((1, K), mx.float32), w, "tensor"), "16-bit"),
        (lambda w: few_rows_call(mx.zeros((1, K)), w, "wgmma"), "'wgmma'"),
        (lambda w: few_rows_call(rows(2), w, "row"), "form 'row' has one row and one part, not 2 and 1"),
        (lambda w: few_rows_call(rows(1), w, "row", parts=2), "form 'row' has one row and one part, not 1 and 2"),
        (lambda w: few_rows_call(mx.zeros((1, K), mx.float32), w, "row"), "16-bit"),
        (lambda w: few_rows_call(mx.zeros((1, K), mx.int32), w), "int32"),
        (lambda w: many_rows_call(mx.zeros((9, K)), w, tile=48), "48"),
        (lambda w: Packed(w.w, w.scales, w.biases, 64, 3), "3 bits"),
        (lambda w: Packed(w.w, w.scales[:, :2], w.biases, 64, 4), "scales and biases"),
        (lambda w: Packed(w.w.astype(mx.int32), w.scales, w.biases), "uint32"),
    ],
)
def test_bad_input_is_named(call, message, weights):
    with pytest.raises(ValueError, match=message):
        call(weights)
