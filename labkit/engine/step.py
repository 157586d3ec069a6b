"""The step contract (the third of the five): the device runs one token ahead of the host.

The device chooses a token and feeds it to the next forward before the host has read it. So at every boundary
between steps exactly one token is chosen and not yet in the caches, and whoever stops a row there (a stop, a cancel, a
pause, an error) meets that one pending token. A row whose host must see the token first (a grammar has to move before
it can say what comes next) gives up the overlap and keeps the rule.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import mlx.core as mx

from labkit.caches import Cache
from labkit.engine.sampling import Choice, RowSampler, bits, choose
from labkit.models import Model, Rows


class Constraint(Protocol):
    """Decides, token by token, which tokens may follow."""

    def mask(self) -> mx.array | None:
        """Permitted tokens as bits, uint32 [ceil(V / 32)], lowest bit first; None permits all."""
        ...

    def accept(self, token: int) -> None:
        """The token that was chosen."""
        ...


class ReadToken(NamedTuple):
    """A token on the host, with its log-probability and the best alternatives if they were asked for."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] | None


class DecodingRow:
    """One row that is decoded alone: its caches, its sampler, its pending token.

    Attributes:
        fed: tokens in the caches.
        chosen: tokens chosen so far; `fed == prompt + chosen - 1` whenever one is pending.
        host_first: whether each token is read before the next forward is launched.
    """

    def __init__(
        self,
        model: Model,
        caches: list[Cache],
        sampler: RowSampler,
        fed: int,
        constraint: Constraint | None = None,
    ):
        self._model, self.caches, self._sampler = model, caches, sampler
        self.fed, self.chosen = fed, 0
        self._constraint = constraint
        self.host_first = constraint is not None
        self.pending: Choice | None = None

    def start(self, token: int) -> None:
        """Feed the prompt's last token: the first token is chosen, and pending."""
        self._forward(mx.array([token], dtype=mx.int32))

    def launch(self) -> Choice:
        """Feed the pending token; the next one is chosen, and pending. Returns the one that was."""
        before = self.pending
        self._forward(before.token)
        return before

    def _forward(self, token: mx.array) -> None:
        output = self._model(token[:, None], self.caches, Rows.single(self.fed), logits="last")
        mask = self._constraint.mask() if self._constraint else None
        if mask is not None:
            _check_mask(mask, output.logits.shape[-1])
        self.pending = choose(output.logits[:, -1, :], token, [self._sampler], [self.chosen], [mask])
        mx.async_eval(self.pending.arrays())
        self.fed += 1
        self.chosen += 1

    def read(self, choice: Choice) -> ReadToken:
        """Wait for a chosen token.

        Raises:
            FloatingPointError: there was none to choose.
        """
        token = choice.token.item()
        if not math.isfinite(choice.total.item()):
            raise FloatingPointError(
                "the model's logits are NaN or infinite, or nothing that may follow has a finite one: check its "
                "weights, the dtype and logit_bias"
            )
        logprob = None if choice.logprob[0] is None else choice.logprob[0].item()
        top = None
        if choice.top[0] is not None:
            ids, values = choice.top[0]
            top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        if self._constraint is not None:
            self._constraint.accept(token)
        return ReadToken(token, logprob, top)


def _check_mask(mask: mx.array, vocabulary: int) -> None:
    words = -(-vocabulary // 32)
    if not isinstance(mask, mx.array):
        raise ValueError(f"a constraint's mask must be an mx.array, uint32 [{words}], not {type(mask).__name__}")
    if mask.shape != (words,) or mask.dtype != mx.uint32:
        raise ValueError(f"a constraint's mask must be uint32 [{words}], not {mask.dtype} {list(mask.shape)}")
    if not mx.any(bits(mask, vocabulary)).item():
        raise ValueError("the constraint permits no token: end the request instead")
