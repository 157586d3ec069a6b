"""Gated DeltaNet in plain MLX operations, in fp32: the oracles of the kernels, and the mechanism to read first.

Names as in the paper: a head keeps a state S [Dv, Dk] that maps keys to values. Each token first forgets a little
(decay), then replaces what S answers to its key by its value, as far as beta says (the delta rule), then asks S with
its query.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from labkit.kernels.signature import Launch

L2_EPS = 1e-6
"""Added to the sum of squares when queries and keys are normalised."""

CONV_TAPS = 4
"""Length of the causal convolution; its tail holds the last three tokens."""


def valid_tokens(spans: mx.array, length: int) -> mx.array:
    """[B, T] bool: token t of row b counts if spans[b, 0] <= t < spans[b, 1]."""
    position = mx.arange(length)
    return (position >= spans[:, :1]) & (position < spans[:, 1:])


def gates(a: mx.array, b: mx.array, a_log: mx.array, dt_bias: mx.array) -> tuple[mx.array, mx.array]:
    """log_decay = -exp(A_log) softplus(a + dt_bias) and beta = sigmoid(b), fp32."""
    a, b, a_log, dt_bias = (x.astype(mx.float32) for x in (a, b, a_log, dt_bias))
    return -mx.exp(a_log) * nn.softplus(a + dt_bias), mx.sigmoid(b)


def l2_norm(x: mx.array) -> mx.array:
    """x over the root of its sum of squares (plus 1e-6), along the last axis."""
    return x * mx.rsqrt(mx.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def causal_conv(x: mx.array, tail: mx.array, weight: mx.array, spans: mx.array) -> tuple[mx.array, mx.array]:
    """SiLU of a depthwise convolution over the last four tokens, fp32, and the last three tokens for the next call.

    Pads do not exist: the first valid token of a row follows its tail directly, and the new tail ends with the last
    valid one.

    Args:
        x: [B, T, C]. tail: [B, 3, C]. weight: [C, 4]. spans: [B, 2].

    Returns:
        [B, T, C], zero at pads, and the new tail [B, 3, C].
    """
    length, keep = x.shape[1], CONV_TAPS - 1
    first = mx.clip(spans[:, :1], 0, length)
    last = mx.clip(spans[:, 1:], first, length)
    sequence = mx.concatenate([tail, x], axis=1)

    def at(position: mx.array) -> mx.array:  # of the row's own tokens; -3, -2 and -1 are the tail
        index = mx.where(position < 0, position + keep, position + first + keep)
        return mx.take_along_axis(sequence, mx.clip(index, 0, length + keep - 1)[..., None], axis=1)

    position = mx.arange(length) - first
    taps = [at(position - keep + i).astype(mx.float32) * weight[:, i].astype(mx.float32) for i in range(CONV_TAPS)]
    out = nn.silu(taps[0] + taps[1] + taps[2] + taps[3])
    out = mx.where(valid_tokens(spans, length)[..., None], out, 0.0)
    return out, at((last - first) + mx.arange(-keep, 0))


def recurrence(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array, spans: mx.array
) -> tuple[mx.array, mx.array, list[mx.array]]:
    """The gated delta rule token by token, fp32.

    Args:
        q, k: [B, T, Hk, Dk]. v: [B, T, Hv, Dv]. log_decay, beta: [B, T, Hv]. state: [B, Hv, Dv, Dk]. spans: [B, 2].

    Returns:
        y [B, T, Hv, Dv], zero at pads; the state after the last valid token; the state after each token.
    """
    q, k, v, log_decay, beta, state = (x.astype(mx.float32) for x in (q, k, v, log_decay, beta, state))
    repeats = v.shape[2] // q.shape[2]
    q, k = mx.repeat(q, repeats, axis=2), mx.repeat(k, repeats, axis=2)
    valid = valid_tokens(spans, q.shape[1])[:, :, None]
    outputs, states = [], []
    for t in range(q.shape[1]):
        key, query = k[:, t, :, None, :], q[:, t, :, None, :]
        decayed = state * mx.exp(log_decay[:, t])[..., None, None]
        delta = beta[:, t, :, None] * (v[:, t] - mx.sum(decayed * key, axis=-1))
        new = decayed + delta[..., None] * key
        outputs.append(mx.where(valid[:, t, :, None], mx.sum(new * query, axis=-1), 0.0))
        state = mx.where(valid[:, t, :, None, None], new, state)
        states.append(state)
    return mx.stack(outputs, axis=1), state, states


def gated_norm(y: mx.array, z: mx.array, weight: mx.array, eps: float) -> mx.array:
    """RMSNorm over the last axis, times weight and silu(z), fp32."""
    y, z, weight = (x.astype(mx.float32) for x in (y, z, weight))
    return y * mx.rsqrt(mx.mean(y * y, axis=-1, keepdims=True) + eps) * weight * nn.silu(z)


def scan(launch: Launch) -> list[mx.array]:
    """Oracle of the `scan` kernels: y and the new state."""
    q, k, v, log_decay, beta, state, spans, _ = launch.inputs
    return list(recurrence(q, k, v, log_decay, beta, state, spans)[:2])


def layer_inputs(
    launch: Launch,
    qkv: mx.array,
    a: mx.array,
    b: mx.array,
    tail: mx.array,
    weight: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    spans: mx.array,
) -> list[mx.array]:
    """q, k, v, log_decay, beta, all zero at pads, and the new tail, fp32; head counts and sizes from the launch's
    template."""
    template = dict(launch.template)
    hk, hv, dk, dv = (template[name] for name in ("HK", "HV", "DK", "DV"))
    batch, tokens = qkv.shape[:2]
    out, new_tail = causal_conv(qkv, tail, weight, spans)
    q, k, v = mx.split(out, [hk * dk, 2 * hk * dk], axis=-1)
    log_decay, beta = gates(a, b, a_log, dt_bias)
    valid = valid_tokens(spans, tokens)[..., None]
    return [
        l2_norm(q.reshape(batch, tokens, hk, dk)) * dk**-0.5,
        l2_norm(k.reshape(batch, tokens, hk, dk)),
        v.reshape(batch, tokens, hv, dv),
        mx.where(valid, log_decay, 0.0),
        mx.where(valid, beta, 0.0),
        new_tail.astype(mx.float32),
    ]


def conv(launch: Launch) -> list[mx.array]:
    """Oracle of the `conv` kernel: q, k, v, log_decay, beta and the new tail."""
    *inputs, _ = launch.inputs
    return layer_inputs(launch, *inputs)


def norm(launch: Launch) -> list[mx.array]:
    """Oracle of the `gated_norm` kernel."""
    y, z, weight, eps = launch.inputs
    return [gated_norm(y, z, weight, eps)]


def step(launch: Launch) -> list[mx.array]:
    """Oracle of the `step` kernel: the normed output, the state or the state after each token, and the new tail."""
    qkv, a, b, z, tail, state, weight, a_log, dt_bias, norm_weight, spans, eps = launch.inputs
    prepared = layer_inputs(launch, qkv, a, b, tail, weight, a_log, dt_bias, spans)
    # Rounded to the activations' dtype, as separate kernels would hand them on.
    q, k, v = (x.astype(qkv.dtype) for x in prepared[:3])
    y, state, states = recurrence(q, k, v, *prepared[3:5], state, spans)
    out = gated_norm(y.astype(qkv.dtype), z, norm_weight, eps)
    out = mx.where(valid_tokens(spans, qkv.shape[1])[..., None, None], out, 0.0)
    return [out, mx.stack(states, axis=1) if dict(launch.template)["EACH"] else state, prepared[5]]
