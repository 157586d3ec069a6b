"""Gated DeltaNet on a CPU: numba, one head of one row a task, its state in cache.

numba is imported at the first call: it takes a second, and no GPU needs it.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np

from labkit.kernels.gated_delta import reference
from labkit.kernels.signature import Launch


def scan(launch: Launch) -> list[mx.array]:
    """`scan` on numpy views of the inputs. Each token's arithmetic is the same wherever it stands in a call."""
    *tokens, state, spans, _ = launch.inputs
    return _recurrence(launch, tokens, state, spans, each=False)


def step(launch: Launch) -> list[mx.array]:
    """`decode_step`: convolution and norms in MLX operations, which are short here; the recurrence in numba."""
    qkv, a, b, z, tail, state, weight, a_log, dt_bias, norm_weight, spans, eps = launch.inputs
    each = dict(launch.template)["EACH"]
    prepared = reference.layer_inputs(launch, qkv, a, b, tail, weight, a_log, dt_bias, spans)
    tokens = [*(x.astype(qkv.dtype) for x in prepared[:3]), *prepared[3:5]]
    y, states = _recurrence(launch, tokens, state, spans, each)
    out = reference.gated_norm(y, z, norm_weight, eps)
    out = mx.where(reference.valid_tokens(spans, qkv.shape[1])[..., None, None], out, 0.0)
    return [out.astype(qkv.dtype), states, prepared[5].astype(tail.dtype)]


def _recurrence(launch: Launch, tokens: list[mx.array], state: mx.array, spans: mx.array, each: bool) -> list[mx.array]:
    dtype = tokens[0].dtype
    q, k, v, log_decay, beta = (np.array(x.astype(mx.float32), copy=False) for x in tokens)
    batch, length = v.shape[:2]
    limits = np.clip(np.array(spans), 0, length)
    y = np.zeros_like(v)
    states = np.zeros((batch, length if each else 1, *state.shape[1:]), np.float32)
    _compiled()(q, k, v, log_decay, beta, np.array(state, copy=False), limits, y, states)
    return [mx.array(y).astype(dtype), mx.array(states if each else states[:, 0])]


@cache
def _compiled():
    from numba import njit, prange

    @njit(parallel=True, fastmath={"reassoc", "contract", "nsz"}, cache=True)
    def recurrence(q, k, v, log_decay, beta, state, limits, y, states):
        batch, _, heads, dv = v.shape
        dk, repeats, slots = q.shape[3], heads // q.shape[2], states.shape[1]
        for task in prange(batch * heads):
            b, h = task // heads, task % heads
            s = state[b, h].copy()
            first, last = limits[b, 0], max(limits[b, 0], limits[b, 1])
            if slots > 1:
                for t in range(first):
                    states[b, t, h] = s
            for t in range(first, last):
                decay, strength = np.exp(log_decay[b, t, h]), beta[b, t, h]
                key, query = k[b, t, h // repeats], q[b, t, h // repeats]
                for d in range(dv):
                    seen = np.float32(0)
                    for i in range(dk):
                        seen += s[d, i] * key[i]
                    delta = strength * (v[b, t, h, d] - decay * seen)
                    out = np.float32(0)
                    for i in range(dk):
                        s[d, i] = decay * s[d, i] + delta * key[i]
                        out += s[d, i] * query[i]
                    y[b, t, h, d] = out
                if slots > 1:
                    states[b, t, h] = s
            for t in range(last if slots > 1 else 0, slots):
                states[b, t, h] = s

    return recurrence
