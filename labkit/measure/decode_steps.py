"""What decode steps and a prompt really take, for a model that speaks mlx-lm's interface."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


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


def time_steps(model: Any, *, context: int, steps: int, vocab_size: int, chunk: int = 512, seed: int = 0) -> StepTimes:
    """Read a random prompt of `context` tokens and then decode `steps` tokens greedily, one row, timing each.

    Every step's token is read by the host before the next one starts, so a step holds its whole latency. One prompt
    chunk and one step beforehand are not counted (compilation).

    Args:
        model: an mlx-lm module.
        context, steps: at least 1.
        vocab_size: tokens are drawn below it.
        chunk: tokens of the prompt per forward.
        seed: of the prompt.
    """
    if context < 1 or steps < 1:
        raise ValueError(f"context and steps must be at least 1, not {context} and {steps}")
    from mlx_lm.models.cache import make_prompt_cache

    prompt = mx.random.randint(0, vocab_size, (1, context), key=mx.random.key(seed))
    mx.eval(model.parameters(), prompt)
    model.eval()
    cold = make_prompt_cache(model)
    for tokens in (prompt[:, : min(context, 8)], prompt[:, :1]):
        mx.eval(model(tokens, cache=cold))

    cache = make_prompt_cache(model)
    start = time.perf_counter()
    for first in range(0, context, chunk):
        logits = model(prompt[:, first : first + chunk], cache=cache)
        mx.eval(logits)
    prefill = time.perf_counter() - start
    decode, token = [], mx.argmax(logits[:, -1:], axis=-1)
    mx.eval(token)
    for _ in range(steps):
        start = time.perf_counter()
        token = mx.argmax(model(token, cache=cache)[:, -1:], axis=-1)
        token.item()
        decode.append(time.perf_counter() - start)
    return StepTimes(tuple(decode), prefill, context)
