"""The Gated DeltaNet mixer: projections, causal convolution, the gated delta rule, a gated norm, and out again.

Names as in the paper (Yang, Kautz and Hatamizadeh, arXiv 2412.06464). What a layer remembers is the convolution's tail
[B, 3, C] and a state [B, Hv, Dv, Dk] that maps keys to values.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from labkit.caches import Recurrent
from labkit.kernels.fused import gated_rms_norm
from labkit.kernels.gated_delta import (
    Tensor,
    chunked,
    decode_step,
    gated_delta_update,
    gated_norm,
    row_spans,
    scan,
    scan_blocked,
    scan_inputs,
)
from labkit.kernels.gated_delta import reference as plain
from labkit.models.hybrid.config import HybridConfig
from labkit.models.hybrid.packing import DeltaWeights
from labkit.models.hybrid.plan import Step

MAX_STEP = 8
"""Tokens that the one-launch step takes."""


class Memory(NamedTuple):
    """The conv tail and the state; with a recording step the tail and the state after each token, [B, L, ...]."""

    tail: mx.array
    state: mx.array


class DeltaLayer:
    """One layer's mixer."""

    def __init__(self, config: HybridConfig, weights: DeltaWeights):
        self.config, self.weights = config, weights
        self.heads = config.key_heads, config.value_heads
        self.dims = config.key_dim, config.value_dim

    def __call__(self, projected: mx.array, cache: Recurrent, step: Step) -> mx.array:
        """`inputs` of the normalised x, [B, L, N] -> [B, L, hidden]; moves the cache on."""
        out, memory = self.mix(projected, self.memory(cache, step), step)
        self.keep(cache, memory, step)
        return out

    def memory(self, cache: Recurrent, step: Step) -> Memory:
        """What the cache holds; zeros before the first token."""
        tail, state = cache.cache
        if tail is not None:
            return Memory(tail, state)
        config, batch = self.config, step.batch
        shape = (batch, config.value_heads, config.value_dim, config.key_dim)
        return Memory(mx.zeros((batch, 3, config.conv_channels), self.weights.conv.dtype), mx.zeros(shape, mx.float32))

    def keep(self, cache: Recurrent, memory: Memory, step: Step) -> None:
        """Give the cache what a step left."""
        if step.recording:
            for index, states in enumerate(memory):
                cache.record(index, states)
            memory = Memory(*(states[:, -1] for states in memory))
        cache[0], cache[1] = memory
        cache.advance(step.length)

    def mix(self, projected: mx.array, memory: Memory, step: Step) -> tuple[mx.array, Memory]:
        """The layer as a function of arrays alone; projected [B, L, N] or [B * L, N]."""
        by_rows = (step.batch, step.length, projected.shape[-1])
        if not self.config.delta_fits_kernels:
            y, after = self._plainly(projected.reshape(by_rows), memory, step)
        elif step.length <= MAX_STEP and step.plan.variants.fuse_recurrence and not step.plan.invariant:
            y, after = self._in_one_launch(projected, memory, step)
        else:
            y, after = self._in_three(projected.reshape(by_rows), memory, step)
        # Shapes spelled out: a reshape to what is already there is no operation.
        y = y.reshape(*projected.shape[:-1], self.config.delta_width)
        return step.plan.product(y, self.weights.output), after

    def _places(self, projected: mx.array) -> tuple[int, int, int] | None:
        """The columns of z, a and b in the projection's rows, where kernels can read them in place."""
        channels, width, heads = self.config.conv_channels, self.config.delta_width, self.config.value_heads
        readable = projected.shape[-1] % 4 == 0 and channels % 4 == 0
        return (channels, channels + width, channels + width + heads) if readable else None

    def _split(self, projected: mx.array) -> list[mx.array]:
        """qkv, z, a, b."""
        channels, width = self.config.conv_channels, self.config.delta_width
        ends = [channels, channels + width, channels + width + self.config.value_heads]
        return mx.split(projected, ends, axis=-1)

    def _in_one_launch(self, projected: mx.array, memory: Memory, step: Step) -> tuple[mx.array, Memory]:
        weights = self.weights
        places = self._places(projected)
        qkv, z, a, b = (projected, *places) if places else self._split(projected)
        y, state, tail = decode_step(
            qkv, a, b, z, memory.tail, memory.state, weights.conv, weights.a_log, weights.dt_bias, weights.norm,
            self.config.eps, step.spans, heads=self.heads, dims=self.dims, each=step.recording,
        )  # fmt: skip
        return y, Memory(self._tails(memory.tail, projected) if step.recording else tail, state)

    def _in_three(self, projected: mx.array, memory: Memory, step: Step) -> tuple[mx.array, Memory]:
        weights, channels = self.weights, self.config.conv_channels
        places = self._places(projected)
        qkv, z, a, b = (projected, *places) if places else self._split(projected)
        q, k, v, log_decay, beta, tail = scan_inputs(
            qkv, a, b, memory.tail, weights.conv, weights.a_log, weights.dt_bias, step.spans,
            heads=self.heads, dims=self.dims,
        )  # fmt: skip
        if step.recording:
            y, states = _scan_each(q, k, v, log_decay, beta, memory.state)
            memory = Memory(self._tails(memory.tail, projected), states)
        else:
            y, state = _update(step)(q, k, v, log_decay, beta, memory.state, step.spans)
            memory = Memory(tail, state)
        if places:
            return gated_rms_norm(y, projected, weights.norm, self.config.eps, start=channels), memory
        return gated_norm(y, z.reshape(y.shape), weights.norm, self.config.eps), memory

    def _plainly(self, projected: mx.array, memory: Memory, step: Step) -> tuple[mx.array, Memory]:
        """By MLX's operations, for heads of sizes that the kernels do not take."""
        weights, config = self.weights, self.config
        qkv, z, a, b = self._split(projected)
        spans = row_spans(step.batch, step.length) if step.spans is None else step.spans
        out, tail = plain.causal_conv(qkv, memory.tail, weights.conv, spans)
        keys = config.key_heads * config.key_dim
        q, k, v = mx.split(out, [keys, 2 * keys], axis=-1)
        per_head = lambda array, heads: array.reshape(step.batch, step.length, heads, -1)
        q, k = (plain.l2_norm(per_head(array, config.key_heads)) for array in (q, k))
        gates = plain.gates(a, b, weights.a_log, weights.dt_bias)
        v = per_head(v, config.value_heads)
        y, state, states = plain.recurrence(q * config.key_dim**-0.5, k, v, *gates, memory.state, spans)
        y = plain.gated_norm(y, z.reshape(y.shape), weights.norm, config.eps).astype(qkv.dtype)
        if step.recording:
            return y, Memory(self._tails(memory.tail, projected), mx.stack(states, axis=1))
        return y, Memory(tail.astype(qkv.dtype), state)

    def _tails(self, tail: mx.array, projected: mx.array) -> mx.array:
        """The conv tail after each token: [B, L, 3, C]."""
        batch, _, channels = tail.shape
        new = projected[..., :channels].reshape(batch, -1, channels)
        sequence = mx.concatenate([tail, new], axis=1)
        return mx.stack([sequence[:, t + 1 : t + 4] for t in range(new.shape[1])], axis=1)


def _update(step: Step):
    """The form of the recurrence that the plan asks for."""
    if step.plan.invariant or step.plan.variants.delta == "scan":
        return scan
    if step.plan.variants.delta == "blocked":
        return scan_blocked
    if step.plan.variants.delta == "chunked":
        return _chunked
    return gated_delta_update


def _chunked(q: mx.array, *others: mx.array) -> tuple[mx.array, mx.array]:
    # With remainders, as gated_delta_update takes it, where tensor cores can.
    wide = q.dtype == mx.bfloat16 and q.shape[-1] == others[1].shape[-1] == 128
    return chunked(q, *others, tensor=Tensor(split=True) if wide else False)


def _scan_each(q, k, v, log_decay, beta, state) -> tuple[mx.array, mx.array]:
    """The scan, a token a call, with the state after each: the same bits as in one call."""
    outputs, states = [], []
    for t in range(q.shape[1]):
        now = slice(t, t + 1)
        y, state = scan(q[:, now], k[:, now], v[:, now], log_decay[:, now], beta[:, now], state)
        outputs.append(y)
        states.append(state)
    return mx.concatenate(outputs, axis=1), mx.stack(states, axis=1)
