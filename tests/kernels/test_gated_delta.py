"""Gated DeltaNet beyond the gates of each kernel: against float64 and mlx-lm, cut into calls, with pads, across its forms."""

import mlx.core as mx
import numpy as np
import pytest

from labkit.kernels.gated_delta import (
    PACKED,
    PLAIN,
    Layout,
    decode_step,
    gated_norm,
    mask_spans,
    row_spans,
    scan,
    scan_inputs,
    tail_after,
)
from labkit.kernels.gated_delta.gates import layer_inputs
from labkit.kernels.gated_delta.gates import scan_inputs as random_scan_inputs

TEXTS = ["simulator", "reference", "native"]


def same_bits(a: mx.array, b: mx.array) -> bool:
    return np.array_equal(np.array(a.astype(mx.float32)), np.array(b.astype(mx.float32)))


def in_float64(q, k, v, log_decay, beta, state, spans=None):
    """The recurrence as the paper writes it, in float64: y [B, T, Hv, Dv] and the last state."""
    q, k, v, log_decay, beta, state = (
        np.array(x.astype(mx.float32), np.float64) for x in (q, k, v, log_decay, beta, state)
    )
    batch, length, heads = v.shape[:3]
    repeats, state, y = heads // q.shape[2], state.copy(), np.zeros_like(v)
    for b in range(batch):
        first, last = (0, length) if spans is None else np.clip(np.array(spans[b]), 0, length)
        for h in range(heads):
            s = state[b, h]
            for t in range(first, last):
                key, query = k[b, t, h // repeats], q[b, t, h // repeats]
                s = np.exp(log_decay[b, t, h]) * (s - beta[b, t, h] * np.outer(s @ key, key))
                s = s + beta[b, t, h] * np.outer(v[b, t, h], key)
                y[b, t, h] = s @ query
            state[b, h] = s
    return y, state


def worst(got: mx.array, want: np.ndarray) -> float:
    """Largest error as a share of the largest value."""
    return float(np.abs(np.array(got.astype(mx.float32)) - want).max() / np.abs(want).max())


@pytest.fixture(autouse=True)
def _seed():
    mx.random.seed(7)


@pytest.mark.parametrize("target", TEXTS)
@pytest.mark.parametrize(
    "sizes", [(1, 40, 1, 2, 128, 128), (2, 9, 2, 4, 64, 32), (1, 5, 1, 1, 192, 96), (1, 6, 1, 3, 256, 64)]
)
def test_scan_against_float64(target, sizes):
    inputs = random_scan_inputs(*sizes, mx.float32)
    want_y, want_state = in_float64(*inputs)
    y, state = scan(*inputs, target=target)
    assert worst(y, want_y) < 2e-6
    assert worst(state, want_state) < 1e-6


@pytest.mark.parametrize("layout", [PLAIN, PACKED, Layout(16, 2, 2, 8), Layout(4, 1, 2, 8), Layout(16, 4, 1, 4)])
def test_layouts_against_float64(layout):
    inputs = random_scan_inputs(1, 11, 1, 2, 128, 64, mx.float32)
    want_y, want_state = in_float64(*inputs)
    y, state = scan(*inputs, layout=layout, target="simulator")
    assert worst(y, want_y) < 2e-6
    assert worst(state, want_state) < 1e-6


@pytest.mark.parametrize("target", TEXTS)
@pytest.mark.parametrize("pieces", [[1] * 20, [7, 13], [16, 4], [3, 1, 16]])
def test_scan_does_not_depend_on_how_tokens_are_cut_into_calls(target, pieces):
    *tokens, state = random_scan_inputs(2, 20, 1, 2, 128, 64, mx.bfloat16)
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

    q, k, v, log_decay, beta, state = random_scan_inputs(2, 12, 2, 4, 128, 64, mx.float32)
    mask = mx.array([[t >= 3 for t in range(12)], [t < 9 for t in range(12)]])
    want_y, want_state = gated_delta_ops(q, k, v, mx.exp(log_decay), beta, state, mask)
    y, new_state = scan(q, k, v, log_decay, beta, state, mask_spans(mask), target="simulator")
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
@pytest.mark.parametrize("sizes", [(2, 7, 2, 4, 128, 128), (1, 5, 1, 3, 64, 96)])
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
    """Whatever stands in the pads, and however the tokens are cut: q, k, v and tail are those of the tokens in a row."""
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


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("sizes", [(2, 3, 1, 2, 128, 128), (1, 8, 1, 1, 64, 256)])
def test_decode_step_is_the_three_launches_bit_for_bit(dtype, sizes):
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


def test_spans():
    assert row_spans(2, 5).tolist() == [[0, 5], [0, 5]]
    assert row_spans(2, 5, mx.array([3, 9]), mx.array([1, -2])).tolist() == [[1, 3], [-2, 9]]
    mask = mx.array([[0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]]).astype(mx.bool_)
    assert mask_spans(mask).tolist() == [[1, 3], [0, 0], [0, 4], [3, 4]]
    with pytest.raises(ValueError, match="one entry a row"):
        row_spans(2, 5, mx.array([1, 2, 3]))


def test_bad_input_is_named():
    q, k, v, log_decay, beta, state = random_scan_inputs(1, 4, 2, 4, 64, 64, mx.float32)
    with pytest.raises(ValueError, match=r"k needs shape \(1, 4, 2, 64\)"):
        scan(q, k[:, :3], v, log_decay, beta, state)
    with pytest.raises(ValueError, match="multiple of the key heads, not 2 and 3"):
        scan(q, k, v[:, :, :3], log_decay, beta, state)
    with pytest.raises(ValueError, match="a multiple of 32, not 40"):
        scan(q[..., :40], k[..., :40], v, log_decay, beta, state)
    with pytest.raises(ValueError, match="state needs shape .* and dtype"):
        scan(q, k, v, log_decay, beta, state.astype(mx.bfloat16))
    with pytest.raises(ValueError, match=r"spans needs shape \(1, 2\)"):
        scan(q, k, v, log_decay, beta, state, mx.array([0, 4], dtype=mx.int32))
    given = layer_inputs(1, 9, 1, 1, 32, 32, mx.float32)
    with pytest.raises(ValueError, match="up to 8 tokens, not 9"):
        decode_step(**given, eps=1e-6, heads=(1, 1), dims=(32, 32))
