"""Gated DeltaNet beyond the gates of each kernel: against float64 and mlx-lm, cut into calls, with pads, across its
forms."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from labkit.kernels import cuda_build, simulator
from labkit.kernels.gated_delta import (
    PLAIN,
    Layout,
    Tensor,
    chunked,
    decode_step,
    gated_delta_update,
    gated_norm,
    row_spans,
    scan,
    scan_blocked,
    scan_inputs,
    tail_after,
)
from labkit.kernels.gated_delta.float64 import in_float64
from labkit.kernels.gated_delta.gates import layer_inputs
from labkit.kernels.gated_delta.gates import scan_inputs as random_scan_inputs
from labkit.kernels.gated_delta.recurrence import SCAN, scan_call
from labkit.kernels.gated_delta.shapes import RuleInputs
from labkit.kernels.gated_delta.step import STEP, step_call
from labkit.kernels.signature import threadgroup_size

TEXTS = ["simulator", "reference", "native"]


def same_bits(a: mx.array, b: mx.array) -> bool:
    return np.array_equal(np.array(a.astype(mx.float32)), np.array(b.astype(mx.float32)))


def worst(got: mx.array, want: np.ndarray) -> float:
    """Largest error as a share of the largest value."""
    return float(np.abs(np.array(got.astype(mx.float32)) - want).max() / np.abs(want).max())


def mean_error(got: mx.array, want: np.ndarray) -> float:
    """Root-mean-square error as a share of the values' own."""
    return float(np.sqrt(((np.array(got.astype(mx.float32)) - want) ** 2).mean() / (want**2).mean()))


@pytest.fixture(autouse=True)
def _seed():
    mx.random.seed(7)


@pytest.mark.parametrize("target", ["reference", "native"])
@pytest.mark.parametrize("sizes", [(1, 40, 1, 2, 128, 128), (2, 9, 2, 4, 64, 32), (1, 6, 1, 3, 256, 64)])
def test_scan_against_float64(target, sizes):
    inputs = random_scan_inputs(*sizes, mx.float32)
    y, state = scan(*inputs, target=target)
    want_y, want_state = in_float64(*inputs)
    assert worst(y, want_y) < 2e-6
    assert worst(state, want_state) < 1e-6


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        ((1, 11, 1, 2, 96, 64), None),
        ((1, 6, 1, 1, 256, 64), None),
        ((1, 11, 1, 2, 128, 64), PLAIN),
        ((1, 11, 1, 2, 128, 64), Layout(16, 2, 2, 8)),
        ((1, 11, 1, 2, 128, 64), Layout(4, 1, 2, 8)),
    ],
)
def test_layouts_against_float64(sizes, layout):
    inputs = random_scan_inputs(*sizes, mx.float32)
    y, state = scan(*inputs, layout=layout, target="simulator")
    want_y, want_state = in_float64(*inputs)
    assert worst(y, want_y) < 2e-6
    assert worst(state, want_state) < 1e-6


# With remainders, y has bf16's own rounding (1.7e-3) and little more; without, twice that.
CHUNKED = [
    pytest.param(mx.float32, False, 1e-6, 1e-6, id="fp32"),
    pytest.param(mx.bfloat16, Tensor(32, 1, False), 5e-3, 4e-3, id="tensor-cores"),
    pytest.param(mx.bfloat16, Tensor(32, 1, True), 2e-3, 1e-5, id="tensor-cores-split"),
]


@pytest.mark.parametrize(("dtype", "tensor", "bound_y", "bound_state"), CHUNKED)
@pytest.mark.parametrize("target", ["simulator", "reference"])
def test_chunked_against_float64(dtype, tensor, bound_y, bound_state, target):
    inputs = random_scan_inputs(1, 70, 1, 2, 128, 128, dtype)
    want_y, want_state = in_float64(*inputs)
    y, state = chunked(*inputs, tensor=tensor, target=target)
    assert mean_error(y, want_y) < bound_y
    assert mean_error(state, want_state) < bound_state


@pytest.mark.parametrize("tensor", [False, Tensor(32, 1, True)])
def test_chunked_with_pads(tensor):
    """NaN in the pads; chunks of a row begin at its first valid token, so each row gives the bits that it gives
    alone."""
    length, spans = 45, [[4, 45], [0, 33], [9, 9]]
    *tokens, state = random_scan_inputs(3, length, 1, 2, 128, 128, mx.bfloat16)
    counts = np.array([[a <= t < b for t in range(length)] for a, b in spans])
    valid = [mx.array(counts).reshape(3, length, *[1] * (x.ndim - 2)) for x in tokens]
    poisoned = [mx.where(v, x, mx.array(float("nan"), dtype=x.dtype)) for v, x in zip(valid, tokens, strict=True)]
    options = {"tensor": tensor, "target": "simulator"}
    y, new_state = chunked(*poisoned, state, mx.array(spans, dtype=mx.int32), **options)
    assert not np.any(np.array(y.astype(mx.float32))[~counts])
    assert same_bits(new_state[2], state[2])
    for row, (first, last) in enumerate(spans[:2]):
        alone = [x[row : row + 1, first:last] for x in tokens]
        y_alone, state_alone = chunked(*alone, state[row : row + 1], **options)
        assert same_bits(y[row, first:last], y_alone[0])
        assert same_bits(new_state[row], state_alone[0])


@pytest.mark.parametrize("tensor", [False, Tensor(32, 1, True)])
def test_chunked_cut_at_whole_chunks_gives_the_same_bits_and_hands_over_to_the_scan(tensor):
    *tokens, state = random_scan_inputs(1, 70, 1, 2, 128, 128, mx.bfloat16)
    options = {"tensor": tensor, "target": "simulator"}
    whole, whole_state = chunked(*tokens, state, **options)
    y, half = chunked(*(x[:, :32] for x in tokens), state, **options)
    rest, last = chunked(*(x[:, 32:] for x in tokens), half, **options)
    assert same_bits(mx.concatenate([y, rest], axis=1), whole)
    assert same_bits(last, whole_state)
    rest, last = scan(*(x[:, 32:] for x in tokens), half, target="simulator")
    assert mean_error(rest, np.array(whole[:, 32:].astype(mx.float32))) < 3e-3
    assert mean_error(last, np.array(whole_state)) < 1e-5


def test_strong_decay_stays_finite():
    """Decay to nothing within a chunk: exponents of differences, not quotients of vanished factors."""
    q, k, v, log_decay, beta, state = random_scan_inputs(1, 40, 1, 1, 128, 128, mx.float32)
    inputs = [q, k, v, log_decay * 40 - 30, beta, state]
    want_y, want_state = in_float64(*inputs)
    for form in (scan, chunked):
        y, last = form(*inputs, target="simulator")
        assert worst(y, want_y) < 1e-5
        assert worst(last, want_state) < 1e-5


def test_the_baseline_is_the_scan():
    inputs = random_scan_inputs(1, 37, 1, 1, 128, 32, mx.float32)
    want_y, want_state = in_float64(*inputs)
    y, state = scan_blocked(*inputs, target="simulator")
    assert worst(y, want_y) < 2e-6
    assert worst(state, want_state) < 1e-6


@pytest.mark.parametrize("target", TEXTS)
@pytest.mark.parametrize("pieces", [[1] * 20, [7, 13], [16, 4], [3, 1, 16]])
def test_scan_does_not_depend_on_how_tokens_are_cut_into_calls(target, pieces):
    *tokens, state = random_scan_inputs(2, sum(pieces), 1, 2, 128, 64, mx.bfloat16)
    whole, whole_state = scan(*tokens, state, target=target)
    outputs, at = [], 0
    for length in pieces:
        y, state = scan(*(x[:, at : at + length] for x in tokens), state, target=target)
        outputs.append(y)
        at += length
    assert same_bits(mx.concatenate(outputs, axis=1), whole)
    assert same_bits(state, whole_state)


@pytest.mark.parametrize("target", TEXTS)
def test_pads_touch_nothing(target):
    """NaN in the pads: whatever read them would show it. And each row gives the bits that it gives alone."""
    length, spans = 19, [[4, 19], [0, 6], [5, 12], [9, 9], [-7, 40]]
    *tokens, state = random_scan_inputs(5, length, 1, 2, 64, 64, mx.float32)
    counts = np.array([[max(a, 0) <= t < b for t in range(length)] for a, b in spans])
    poisoned = [mx.where(mx.array(counts).reshape(5, length, *[1] * (x.ndim - 2)), x, float("nan")) for x in tokens]
    y, new_state = scan(*poisoned, state, mx.array(spans, dtype=mx.int32), target=target)
    assert not mx.any(mx.isnan(y)).item()
    assert same_bits(new_state[3], state[3])
    for row, (first, last) in enumerate(np.clip(spans, 0, length).tolist()):
        assert not np.any(np.array(y[row])[~counts[row]])
        if first < last:
            alone = [x[row : row + 1, first:last] for x in tokens]
            y_alone, state_alone = scan(*alone, state[row : row + 1], target=target)
            assert same_bits(y[row, first:last], y_alone[0])
            assert same_bits(new_state[row], state_alone[0])


def test_scan_is_mlx_lms():
    from mlx_lm.models.gated_delta import gated_delta_ops

    q, k, v, log_decay, beta, state = random_scan_inputs(2, 12, 2, 4, 64, 64, mx.float32)
    mask = mx.array([[t >= 3 for t in range(12)], [t < 9 for t in range(12)]])
    want_y, want_state = gated_delta_ops(q, k, v, mx.exp(log_decay), beta, state, mask)
    spans = mx.array([[3, 12], [0, 9]], dtype=mx.int32)  # what the mask leaves
    y, new_state = gated_delta_update(q, k, v, log_decay, beta, state, spans, target="simulator")
    assert mx.allclose(y, mx.where(mask[..., None, None], want_y, 0), atol=1e-6).item()
    assert mx.allclose(new_state, want_state, atol=1e-6).item()


class Mixer:
    """mlx-lm's mixer and its cache, without projections, as an oracle of the three forms."""

    def __init__(self, hk, hv, dk, dv, given):
        from mlx_lm.models.cache import ArraysCache
        from mlx_lm.models.qwen3_5 import GatedDeltaNet, TextModelArgs

        args = TextModelArgs(
            model_type="qwen3_5",
            hidden_size=32,
            linear_num_value_heads=hv,
            linear_num_key_heads=hk,
            linear_key_head_dim=dk,
            linear_value_head_dim=dv,
        )
        self.module = GatedDeltaNet(args)
        self.module.conv1d.weight = given["weight"][..., None]
        self.module.A_log, self.module.dt_bias = given["a_log"], given["dt_bias"]
        self.module.norm.weight = given["norm_weight"]
        self.module.out_proj = lambda x: x
        self.cache = ArraysCache(2)
        self.cache[0], self.cache[1] = given["tail"], given["state"]

    def __call__(self, given, mask=None, lengths=None):
        for name in ("qkv", "z", "b", "a"):
            array = given[name].reshape(*given[name].shape[:2], -1)
            setattr(self.module, f"in_proj_{name}", lambda _, array=array: array)
        self.cache.lengths = lengths
        out = self.module(given["qkv"], mask, self.cache)
        return out.reshape(given["z"].shape), self.cache[1], self.cache[0]


def mix(given, spans, heads, dims, target):
    """The mixer as three launches."""
    names = ("qkv", "a", "b", "tail", "weight", "a_log", "dt_bias")
    prepared = scan_inputs(*(given[name] for name in names), spans, heads=heads, dims=dims, target=target)
    y, state = scan(*prepared[:5], given["state"], spans, target=target)
    return gated_norm(y, given["z"], given["norm_weight"], 1e-6, target=target), state, prepared.tail


@pytest.mark.parametrize("target", ["simulator", "reference"])
@pytest.mark.parametrize("sizes", [(2, 7, 2, 4, 64, 64), (1, 5, 1, 3, 64, 96)])
def test_mixer_is_mlx_lms(target, sizes):
    given = layer_inputs(*sizes, mx.float32)
    want = Mixer(*sizes[2:], given)(given)
    got = mix(given, None, sizes[2:4], sizes[4:], target)
    for a, b in zip(got, want, strict=True):
        assert mx.allclose(a, b, atol=3e-5, rtol=1e-5).item()
    assert same_bits(got[2], want[2])


@pytest.mark.parametrize("target", ["simulator", "reference"])
def test_right_pads_are_mlx_lms(target):
    sizes = (3, 6, 1, 2, 64, 64)
    given, lengths = layer_inputs(*sizes, mx.float32), mx.array([6, 2, 1])
    mask = mx.arange(6) < lengths[:, None]
    want = Mixer(*sizes[2:], given)(given, mask, mx.array([6, 2, 1]))  # it counts its lengths down in place
    got = mix(given, row_spans(3, 6, lengths), sizes[2:4], sizes[4:], target)
    assert mx.allclose(got[0], mx.where(mask[..., None, None], want[0], 0), atol=3e-5).item()
    assert mx.allclose(got[1], want[1], atol=3e-5).item()
    assert same_bits(got[2], want[2])


@pytest.mark.parametrize("target", ["simulator", "reference"])
def test_left_pads_of_fresh_rows_are_mlx_lms(target):
    sizes = (2, 6, 1, 2, 64, 64)
    given = layer_inputs(*sizes, mx.float32)
    given["tail"], given["state"] = mx.zeros_like(given["tail"]), mx.zeros_like(given["state"])
    padding = mx.array([0, 4])
    mask = mx.arange(6) >= padding[:, None]
    want = Mixer(*sizes[2:], given)(given, mask)
    got = mix(given, row_spans(2, 6, left_padding=padding), sizes[2:4], sizes[4:], target)
    assert mx.allclose(got[0], mx.where(mask[..., None, None], want[0], 0), atol=3e-5).item()
    assert mx.allclose(got[1], want[1], atol=3e-5).item()
    assert same_bits(got[2], want[2])


@pytest.mark.parametrize("target", ["simulator", "reference"])
def test_conv_tail_follows_the_real_tokens(target):
    """Whatever stands in the pads, and however the tokens are cut: q, k, v and tail are those of the tokens in a
    row."""
    heads, dims = (1, 1), (32, 64)
    given = layer_inputs(1, 11, 1, 1, 32, 64, mx.float32)
    rest = [given[name] for name in ("weight", "a_log", "dt_bias")]
    tokens = [given[name] for name in ("qkv", "a", "b")]
    whole = scan_inputs(*tokens, given["tail"], *rest, heads=heads, dims=dims, target=target)
    tail, at, parts = given["tail"], 0, []
    for left, count, right in [(2, 1, 3), (0, 2, 1), (3, 0, 0), (1, 5, 0), (0, 3, 7)]:
        padded = [
            mx.concatenate([mx.full((1, n, x.shape[2]), float("nan")) if n else x[:, :0] for n in (left,)]
                           + [x[:, at : at + count]]
                           + [mx.full((1, right, x.shape[2]), float("nan")) if right else x[:, :0]], axis=1)
            for x in tokens
        ]  # fmt: skip
        spans = mx.array([[left, left + count]], dtype=mx.int32)
        got = scan_inputs(*padded, tail, *rest, spans, heads=heads, dims=dims, target=target)
        assert not any(mx.any(mx.isnan(x)).item() for x in got)
        if count == 0:
            assert same_bits(got.tail, tail)
        parts.append([x[:, left : left + count] for x in got[:5]])
        tail, at = got.tail, at + count
    for one, pieces in zip(whole[:5], zip(*parts, strict=True), strict=True):
        assert same_bits(one, mx.concatenate(pieces, axis=1))
    assert same_bits(tail, whole.tail)


@pytest.mark.parametrize(
    ("sizes", "dtype"), [((2, 3, 1, 2, 128, 128), mx.bfloat16), ((1, 8, 1, 1, 64, 256), mx.float32)]
)
def test_decode_step_is_the_three_launches_bit_for_bit(sizes, dtype):
    given = layer_inputs(*sizes, dtype)
    spans = mx.array([[0, 2], [1, 3]][: sizes[0]], dtype=mx.int32)
    heads, dims = sizes[2:4], sizes[4:]
    got = decode_step(**given, eps=1e-6, spans=spans, heads=heads, dims=dims, target="simulator")
    out, state, tail = mix(given, spans, heads, dims, "simulator")
    counts = np.array([[a <= t < b for t in range(sizes[1])] for a, b in spans.tolist()])
    assert same_bits(got[0], mx.where(mx.array(counts)[..., None, None], out, 0))
    assert same_bits(got[1], state)
    assert same_bits(got[2], tail)


@pytest.mark.parametrize("target", ["simulator", "reference"])
def test_verification_of_a_draft_is_steps_one_by_one(target):
    """Each of five tokens' states, outputs, and the tail at any accepted count are those of single steps: same bits."""
    sizes, heads, dims = (2, 5, 1, 2, 64, 64), (1, 2), (64, 64)
    given = layer_inputs(*sizes, mx.bfloat16)
    options = {"eps": 1e-6, "heads": heads, "dims": dims, "target": target}
    out, states, tail = decode_step(**given, **options, each=True)
    last = dict(given)
    for t in range(5):
        one = {**last, **{name: given[name][:, t : t + 1] for name in ("qkv", "a", "b", "z")}}
        out_t, last["state"], last["tail"] = decode_step(**one, **options)
        assert same_bits(out[:, t], out_t[:, 0])
        assert same_bits(states[:, t], last["state"])
        assert same_bits(tail_after(given["qkv"], given["tail"], mx.full((2,), t + 1)), last["tail"])
    assert same_bits(tail, last["tail"])


@pytest.mark.parametrize("target", ["reference", "native"])
def test_tokens_may_lie_flat(target):
    """[B * T, C] in, [B * T, Hv * Dv] out: a model's graph needs no operation between the projections and the step."""
    heads, dims = (1, 2), (64, 64)
    given = layer_inputs(2, 3, *heads, *dims, mx.float32)
    options = {"eps": 1e-6, "heads": heads, "dims": dims, "target": target}
    want = decode_step(**given, **options)
    flat = {name: given[name].reshape(6, -1) for name in ("qkv", "a", "b", "z")}
    got = decode_step(**{**given, **flat}, **options)
    assert got[0].shape == (6, 128)
    assert all(same_bits(one, other.reshape(one.shape)) for one, other in zip(got, want, strict=True))
    with pytest.raises(ValueError, match=r"qkv \(5, .*as many rows as the tail"):
        decode_step(**{**given, **flat, "qkv": flat["qkv"][:5]}, **options)


@pytest.mark.parametrize("barrier", [0, 1])
def test_a_barrier_missing_from_the_scan_is_found(barrier):
    call = scan_call(RuleInputs.checked(*random_scan_inputs(1, 40, 1, 1, 128, 32, mx.float32)))
    word = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    parts = SCAN.text.source.split(word)
    assert len(parts) == 3
    source = parts[0] + (word if barrier else "") + parts[1] + ("" if barrier else word) + parts[2]
    launch = SCAN.launch(**call)
    assert simulator.run(SCAN.text, launch, check=True).clean
    assert not simulator.run(replace(SCAN.text, source=source), launch, check=True).clean


def test_spans():
    assert row_spans(2, 5).tolist() == [[0, 5], [0, 5]]
    assert row_spans(2, 5, mx.array([3, 9]), mx.array([1, -2])).tolist() == [[1, 3], [-2, 9]]
    with pytest.raises(ValueError, match="one entry a row"):
        row_spans(2, 5, mx.array([1, 2, 3]))


def test_bad_input_is_named():
    q, k, v, log_decay, beta, state = random_scan_inputs(1, 4, 2, 4, 64, 64, mx.float32)
    with pytest.raises(ValueError, match=r"k needs shape \(1, 4, 2, 64\)"):
        scan(q, k[:, :3], v, log_decay, beta, state)
    with pytest.raises(ValueError, match="multiple of the key heads, not 3 and 2"):
        scan(q, k, v[:, :, :3], log_decay, beta, state)
    with pytest.raises(ValueError, match="a multiple of 32, not 40"):
        scan(q[..., :40], k[..., :40], v, log_decay, beta, state)
    with pytest.raises(ValueError, match="state needs shape"):
        scan(q, k, v, log_decay, beta, state.astype(mx.bfloat16))
    with pytest.raises(ValueError, match=r"spans needs shape \(1, 2\)"):
        scan(q, k, v, log_decay, beta, state, mx.array([0, 4], dtype=mx.int32))
    given = layer_inputs(1, 9, 1, 1, 32, 32, mx.float32)
    with pytest.raises(ValueError, match="up to 192 dimensions, not 256"):
        chunked(*random_scan_inputs(1, 2, 1, 1, 256, 64, mx.float32))
    with pytest.raises(ValueError, match="tensor cores take bfloat16 heads of 128 x 128, not"):
        chunked(q, k, v, log_decay, beta, state, tensor=True)
    with pytest.raises(ValueError, match="up to 8 tokens, not 9"):
        decode_step(**given, eps=1e-6, heads=(1, 1), dims=(32, 32))


@pytest.mark.cuda
@pytest.mark.parametrize("pieces", [[1] * 20 + [300], [160, 160], [33, 287]])
def test_cuda_scan_does_not_depend_on_how_tokens_are_cut_into_calls(cuda_device, pieces):
    test_scan_does_not_depend_on_how_tokens_are_cut_into_calls("cuda", pieces)


@pytest.mark.cuda
@pytest.mark.parametrize("simdgroups", [2, 4, 8])
@pytest.mark.parametrize(("split", "bound_y", "bound_state"), [(False, 5e-3, 4e-3), (True, 2e-3, 2e-5)])
def test_cuda_chunked_against_float64(cuda_device, simdgroups, split, bound_y, bound_state):
    spans = mx.array([[0, 1000], [7, 530]], dtype=mx.int32)
    inputs = random_scan_inputs(2, 1000, 2, 4, 128, 128, mx.bfloat16)
    y, state = chunked(*inputs, spans, tensor=Tensor(64, simdgroups, split), target="cuda")
    for row, (first, last) in enumerate(spans.tolist()):
        *tokens, old = (x[row : row + 1] for x in inputs)
        want_y, want_state = in_float64(*(x[:, first:last] for x in tokens), old)
        assert mean_error(y[row : row + 1, first:last], want_y) < bound_y
        assert mean_error(state[row : row + 1], want_state) < bound_state
    assert not mx.any(y[1, :7]).item()
    assert not mx.any(y[1, 530:]).item()


@pytest.mark.skipif(bool(cuda_build.unavailable()), reason=cuda_build.unavailable())
@pytest.mark.parametrize("dims", [(128, 128), (256, 256)])
def test_a_step_of_any_size_finds_registers_for_all_its_threads(dims):
    """Too many are no error of the compiler's: the launch fails, and what is read is whatever stood in the output."""
    sizes = (1, 8, 1, 1, *dims)
    launch = STEP.launch(**step_call(**layer_inputs(*sizes, mx.bfloat16), eps=1e-6, heads=sizes[2:4], dims=dims))
    used = cuda_build.usage(cuda_build.compile_cuda(cuda_build.translation_unit(STEP.text, launch)).log)
    assert used.groups(threadgroup_size(launch)[0]) >= 1, used


@pytest.mark.cuda
@pytest.mark.parametrize("sizes", [(3, 1, 16, 32, 128, 128), (2, 8, 2, 4, 128, 128), (1, 8, 1, 1, 64, 256)])
def test_cuda_decode_step_is_the_three_launches_bit_for_bit(cuda_device, sizes):
    given, heads, dims = layer_inputs(*sizes, mx.bfloat16), sizes[2:4], sizes[4:]
    got = decode_step(**given, eps=1e-6, heads=heads, dims=dims, target="cuda")
    for a, b in zip(got, mix(given, None, heads, dims, "cuda"), strict=True):
        assert same_bits(a, b)


@pytest.mark.cuda
def test_cuda_pads_touch_nothing(cuda_device):
    test_pads_touch_nothing("cuda")
