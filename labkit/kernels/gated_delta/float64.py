"""The recurrence in float64, token by token: what the errors of every form are measured against."""

from __future__ import annotations

import mlx.core as mx
import numpy as np


def in_float64(*inputs: mx.array) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence in float64: y [B, T, Hv, Dv] and the last state."""
    q, k, v, log_decay, beta, state = (np.array(x.astype(mx.float32), np.float64) for x in inputs)
    repeats = v.shape[2] // q.shape[2]
    q, k = np.repeat(q, repeats, axis=2), np.repeat(k, repeats, axis=2)
    y = np.zeros_like(v)
    for t in range(v.shape[1]):
        state = state * np.exp(log_decay[:, t])[..., None, None]
        delta = beta[:, t, :, None] * (v[:, t] - np.einsum("bhvk,bhk->bhv", state, k[:, t]))
        state = state + delta[..., None] * k[:, t, :, None, :]
        y[:, t] = np.einsum("bhvk,bhk->bhv", state, q[:, t])
    return y, state


def relative_error(got: mx.array, want: np.ndarray) -> float:
    """Root-mean-square difference as a share of what is wanted, three digits of it."""
    difference = np.array(got.astype(mx.float32), np.float64) - want
    return float(f"{np.sqrt((difference**2).mean() / (want**2).mean()):.2e}")
