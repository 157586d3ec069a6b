"""Gated DeltaNet on a CPU: compiled loops, one head of one row a task, its state in cache.

numba is imported at the first call: it takes a second, and no GPU needs it.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np

from labkit.kernels.signature import Launch
from labkit.kernels.workers import all_workers

PARALLEL_FROM = 20_000_000
"""Updates of a state element from which heads are shared out between threads (about 5 ms of one): waking them for less
costs more than it gains on a machine that has other work."""


def scan(launch: Launch) -> list[mx.array]:
    """`scan` on numpy views of the inputs. Each token's arithmetic is the same wherever it stands in a call."""
    from labkit.kernels.gated_delta.loops import scan_heads

    q, k, v, log_decay, beta = (_numpy(x) for x in launch.inputs[:5])
    state, limits = np.array(launch.inputs[5]), _limits(launch.inputs[6], v.shape[1])
    y = np.zeros_like(v)
    stage, tasks = partial(scan_heads, q, k, v, log_decay, beta, limits, state, y), v.shape[0] * v.shape[2]
    if v.shape[1] * state.size < PARALLEL_FROM:
        stage(0, tasks)
    else:
        all_workers().share(stage, tasks)
    return [mx.array(y).astype(launch.output_dtypes[0]), mx.array(state)]


def step(launch: Launch) -> list[mx.array]:
    """`decode_step` in one pass over the heads; nothing is rounded between its parts."""
    from labkit.kernels.gated_delta.loops import step_rows

    qkv, a, b, z, tail, state, weight, a_log, dt_bias, norm_weight = (_numpy(x) for x in launch.inputs[:10])
    batch, length = qkv.shape[:2]
    template = dict(launch.template)
    limits, eps = _limits(launch.inputs[10], length), np.float32(launch.inputs[11].item())
    tokens = np.concatenate([part.reshape(batch * length, -1) for part in (qkv, z, a, b)], axis=1)
    heads, wide = template["HK"], template["HV"] * template["DV"]
    conv, after, new = np.ascontiguousarray(weight.T), tail.copy(), np.array(state)
    each = np.repeat(state[:, None], length, axis=1) if template["EACH"] else np.empty((batch, 0, *state.shape[1:]))
    out = np.zeros((batch * length, wide), np.float32)
    for row, (first, last) in enumerate(limits):
        if first == last:
            continue
        # A row of its own: its tokens lie together, whatever its neighbours' spans are.
        part, one, count = slice(row * length + first, row * length + last), slice(row, row + 1), last - first
        recorded = count if each.size else 0
        states = np.empty((1, recorded, *state.shape[1:]), np.float32)
        step_rows(
            tokens[part], np.ascontiguousarray(tail[one]), new[one], conv, a_log, dt_bias, norm_weight, eps, heads,
            np.array([0, count]), recorded, states, out[part], after[one],
        )  # fmt: skip
        if each.size:
            each[row, first:last], each[row, last:] = states[0], states[0, -1]
    dtypes = launch.output_dtypes
    return [
        mx.array(out.reshape(batch, length, template["HV"], -1)).astype(dtypes[0]),
        mx.array(each if template["EACH"] else new),
        mx.array(after).astype(dtypes[2]),
    ]


def _numpy(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32), copy=False)


def _limits(spans: mx.array, length: int) -> np.ndarray:
    limits = np.clip(np.array(spans).astype(np.int64), 0, length)
    return np.maximum(limits, limits[:, :1])
