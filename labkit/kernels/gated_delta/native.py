"""Gated DeltaNet on a CPU: numba, one head of one row a task, its state in cache.

numba is imported at the first call: it takes a second, and no GPU needs it.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np

from labkit.kernels.signature import Launch


def _numpy(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32), copy=False)


def _limits(spans: mx.array, length: int) -> np.ndarray:
    limits = np.clip(np.array(spans), 0, length)
    return np.maximum(limits, limits[:, :1])


def scan(launch: Launch) -> list[mx.array]:
    """`scan` on numpy views of the inputs. Each token's arithmetic is the same wherever it stands in a call."""
    q, k, v, log_decay, beta, state = (_numpy(x) for x in launch.inputs[:6])
    y, last = np.zeros_like(v), np.empty_like(state)
    compiled_scan(_parallel(v, state))(q, k, v, log_decay, beta, state, _limits(launch.inputs[6], v.shape[1]), y, last)
    return [mx.array(y).astype(launch.output_dtypes[0]), mx.array(last)]


def step(launch: Launch) -> list[mx.array]:
    """`decode_step` in one pass over the heads; nothing is rounded between its parts."""
    *arrays, spans, eps = launch.inputs
    qkv, a, b, z, tail, state, weight, a_log, dt_bias, norm_weight = (_numpy(x) for x in arrays)
    batch, length = qkv.shape[:2]
    template = dict(launch.template)
    z = z.reshape(batch, length, template["HV"], template["DV"])
    out, tail_out = np.zeros_like(z), np.empty_like(tail)
    states = np.empty((batch, length if template["EACH"] else 1, *state.shape[1:]), np.float32)
    compiled_step(_parallel(z, state))(
        qkv, a, b, z, tail, state, weight, a_log, dt_bias, norm_weight, _limits(spans, length), np.float32(eps.item()),
        template["HK"], template["EACH"], out, states, tail_out,
    )  # fmt: skip
    dtypes = launch.output_dtypes
    return [
        mx.array(out).astype(dtypes[0]),
        mx.array(states if template["EACH"] else states[:, 0]),
        mx.array(tail_out).astype(dtypes[2]),
    ]


PARALLEL_FROM = 20_000_000
"""Updates of a state element from which heads are shared out between threads (about 5 ms of one): waking them for less
costs more than it gains on a machine that has other work."""


def _parallel(v: np.ndarray, state: np.ndarray) -> bool:
    return v.shape[1] * state.size >= PARALLEL_FROM


_FAST = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be vectorised; NaN and infinities keep their meaning."""


@cache
def _compiled_token():
    from numba import njit

    @njit(fastmath=_FAST, cache=True)
    def token(s, key, query, value, decay, beta, y):
        dv, dk = s.shape
        for d in range(dv):
            seen = np.float32(0)
            for i in range(dk):
                seen += s[d, i] * key[i]
            delta = beta * (value[d] - decay * seen)
            out = np.float32(0)
            for i in range(dk):
                s[d, i] = decay * s[d, i] + delta * key[i]
                out += s[d, i] * query[i]
            y[d] = out

    return token


@cache
def compiled_scan(parallel: bool):
    """The scan over numpy arrays, compiled at the first call."""
    from numba import njit, prange

    token = _compiled_token()

    @njit(parallel=parallel, fastmath=_FAST, cache=True)
    def scan(q, k, v, log_decay, beta, state, limits, y, last):
        batch, _, heads, _ = v.shape
        repeats = heads // q.shape[2]
        for task in prange(batch * heads):
            b, h = task // heads, task % heads
            s = state[b, h].copy()
            for t in range(limits[b, 0], limits[b, 1]):
                decay = np.exp(log_decay[b, t, h])
                token(s, k[b, t, h // repeats], q[b, t, h // repeats], v[b, t, h], decay, beta[b, t, h], y[b, t, h])
            last[b, h] = s

    return scan


@cache
def compiled_step(parallel: bool):
    """The decode step over numpy arrays, compiled at the first call."""
    from numba import njit, prange

    token = _compiled_token()

    @njit(fastmath=_FAST, cache=True)
    def convolve(x, tail, weight, channel, t, first, out):
        for i in range(out.size):
            c = channel + i
            total = np.float32(0)
            for j in range(4):
                at = t - 3 + j
                total += (x[at, c] if at >= first else tail[at - first + 3, c]) * weight[c, j]
            out[i] = total / (np.float32(1) + np.exp(-total))

    @njit(fastmath=_FAST, cache=True)
    def scale_to(x, length):
        total = np.float32(1e-6)
        for i in range(x.size):
            total += x[i] * x[i]
        factor = length / np.sqrt(total)
        for i in range(x.size):
            x[i] *= factor

    @njit(parallel=parallel, fastmath=_FAST, cache=True)
    def step(
        qkv, a, b, z, tail, state, weight, a_log, dt_bias, norm_weight, limits, eps, hk, each, out, states, tail_out
    ):
        batch, length, _ = qkv.shape
        heads, dv, dk = state.shape[1:]
        one = np.float32(1)
        for task in prange(batch * heads):
            row, h = task // heads, task % heads
            key_head = h // (heads // hk)
            first, last = limits[row, 0], limits[row, 1]
            s = state[row, h].copy()
            query, key = np.empty(dk, np.float32), np.empty(dk, np.float32)
            value, y = np.empty(dv, np.float32), np.empty(dv, np.float32)
            for t in range(length):
                if first <= t < last:
                    convolve(qkv[row], tail[row], weight, key_head * dk, t, first, query)
                    convolve(qkv[row], tail[row], weight, (hk + key_head) * dk, t, first, key)
                    convolve(qkv[row], tail[row], weight, 2 * hk * dk + h * dv, t, first, value)
                    scale_to(query, np.float32(dk**-0.5))
                    scale_to(key, one)
                    x = a[row, t, h] + dt_bias[h]
                    softplus = max(x, np.float32(0)) + np.log1p(np.exp(-abs(x)))
                    decay = np.exp(-np.exp(a_log[h]) * softplus)
                    token(s, key, query, value, decay, one / (one + np.exp(-b[row, t, h])), y)
                    total = np.float32(0)
                    for i in range(dv):
                        total += y[i] * y[i]
                    factor = one / np.sqrt(total / np.float32(dv) + eps)
                    for i in range(dv):
                        gate = z[row, t, h, i]
                        out[row, t, h, i] = y[i] * factor * norm_weight[i] * gate / (one + np.exp(-gate))
                if each:
                    states[row, t, h] = s
            if not each:
                states[row, 0, h] = s
        for row in range(batch):
            first, last = limits[row, 0], limits[row, 1]
            for i in range(3):
                at = last - 3 + i
                tail_out[row, i] = qkv[row, at] if at >= first else tail[row, at - first + 3]

    return step
