"""What decode steps and a prompt really take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from labkit.models.contract import Model
from labkit.models.rows import Rows


@dataclass(frozen=True)
class StepTimes:
    """Seconds of single steps.

    Attributes:
        decode: seconds of each decode step of one row, at about `context` tokens.
        prefill: seconds of the prompt of `context` tokens.
        context: tokens in the cache before the first decode step.
    """

    decode: tuple[float, ...]
    prefill: float
    context: int

    @property
    def decode_median(self) -> float:
        return statistics.median(self.decode)

    @property
    def decode_best(self) -> float:
        return min(self.decode)


def time_steps(model: Model, *, context: int, steps: int, chunk: int = 512, seed: int = 0) -> StepTimes:
    """Read a random prompt of `context` tokens and then decode `steps` tokens greedily, one row, timing each.

    Every step's token is read by the host before the next one starts, so a step holds its whole latency. One prompt
    chunk and one step beforehand are not counted (compilation).

    Args:
        model: a labkit model.
        context, steps: at least 1.
        chunk: tokens of the prompt per forward.
        seed: of the prompt.
    """
    if context < 1 or steps < 1:
        raise ValueError(f"context and steps must be at least 1, not {context} and {steps}")
    prompt = mx.random.randint(0, model.vocab_size, (1, context), key=mx.random.key(seed))
    _read(model, prompt[:, :8], model.make_caches(), chunk)
    mx.eval(_next(model, prompt[:, :1], model.make_caches(), 0))

    caches = model.make_caches()
    start = time.perf_counter()
    token = _read(model, prompt, caches, chunk)
    prefill = time.perf_counter() - start
    decode = []
    for position in range(context, context + steps):
        start = time.perf_counter()
        token = _next(model, token, caches, position)
        token.item()
        decode.append(time.perf_counter() - start)
    return StepTimes(tuple(decode), prefill, context)


def _read(model: Model, prompt: mx.array, caches: list, chunk: int) -> mx.array:
    """Read a prompt in chunks; gives the likeliest next token, computed, [1, 1]."""
    for first in range(0, prompt.shape[1], chunk):
        token = _next(model, prompt[:, first : first + chunk], caches, first)
        mx.eval(token)
    return token


def _next(model: Model, tokens: mx.array, caches: list, position: int) -> mx.array:
    output = model(tokens, caches, Rows.single(position), logits="last")
    return mx.argmax(output.logits, axis=-1)


def time_matrices(model: Any, *, top_k: int, rounds: int = 8) -> float:
    """Seconds that the matrices of one decode step take by themselves: every one once, nothing between them.

    What a whole step takes beyond this is everything else: norms, rotary positions, the recurrence, attention over the
    cache, routing, and the host's share.

    Args:
        model: an mlx-lm module.
        top_k: experts that one token uses; 1 for a dense model.
        rounds: of which the fastest is returned.
    """
    calls = [call for path, layer in _leaves(model) if (call := _matrix_call(path, layer, model, top_k))]
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        mx.eval([call() for call in calls])
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _leaves(model: Any) -> list[tuple[str, Any]]:
    from mlx.nn import Module
    from mlx.utils import tree_flatten

    return tree_flatten(model.leaf_modules(), is_leaf=lambda leaf: isinstance(leaf, Module))


def _matrix_call(path: str, layer: Any, model: Any, top_k: int) -> Callable[[], mx.array] | None:
    """A call that multiplies one token's vector by the layer's matrix, as a decode step does; None without a matrix."""
    from mlx import nn
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    if isinstance(layer, (SwitchLinear, QuantizedSwitchLinear)):
        row = mx.random.normal((1, 1, 1, 1, layer.input_dims))
        # Other experts at each layer, as routing picks them: the same ones would stay in a cache.
        chosen = mx.random.permutation(layer.num_experts)[:top_k].reshape(1, 1, top_k)
        call = lambda: layer(row.astype(_dtype(layer)), chosen)
    elif isinstance(layer, (nn.Linear, nn.QuantizedLinear)):
        row = mx.random.normal((1, 1, _input_size(layer)))
        call = lambda: layer(row.astype(_dtype(layer)))
    elif isinstance(layer, (nn.Embedding, nn.QuantizedEmbedding)) and not _has_head(model):
        row = mx.random.normal((1, 1, _input_size(layer)))
        call = lambda: layer.as_linear(row.astype(_dtype(layer)))
    else:
        return None
    mx.eval(row)
    return call


def _dtype(layer: Any) -> mx.Dtype:
    """The floating dtype that a layer computes in: its scales' if it is quantised."""
    return (layer.scales if "scales" in layer else layer.weight).dtype


def _input_size(layer: Any) -> int:
    if "scales" in layer:
        return layer.scales.shape[-1] * layer.group_size
    return layer.weight.shape[-1]


def _has_head(model: Any) -> bool:
    return any("lm_head" in path for path, _ in _leaves(model))
