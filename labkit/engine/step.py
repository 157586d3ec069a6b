"""The step contract (the third of the five): the device runs one token ahead of the host.

The device chooses a token and feeds it to the next forward before the host has read it. So at every boundary
between steps exactly one token is chosen and not yet in the caches, and whatever stops a row there (a stop, a cancel, a
pause, an error) meets that one pending token. A row whose host must see the token first (a grammar has to move before
it can say what comes next) gives up the overlap and keeps the rule.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import mlx.core as mx

from labkit.engine.sampling import Choice, bits


class Constraint(Protocol):
    """Decides, token by token, which tokens may follow."""

    def mask(self) -> mx.array | None:
        """Permitted tokens as bits, uint32 [ceil(V / 32)], lowest bit first; None permits all."""
        ...

    def accept(self, token: int) -> None:
        """The token that was chosen."""
        ...


class ReadToken(NamedTuple):
    """A token on the host, with its log-probability and the best alternatives if they were asked for; or why none
    could be chosen."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] | None = None
    error: Exception | None = None


def read(choice: Choice) -> list[ReadToken]:
    """Wait for the chosen tokens, [B]."""
    tokens, totals = choice.token.tolist(), choice.total.tolist()
    if not choice.failed and all(map(math.isfinite, totals)) and choice.plain:
        return [ReadToken(token) for token in tokens]
    return [_read_row(choice, row, token, total) for row, (token, total) in enumerate(zip(tokens, totals, strict=True))]


def _read_row(choice: Choice, row: int, token: int, total: float) -> ReadToken:
    if row in choice.failed:
        return ReadToken(token, error=choice.failed[row])
    if not math.isfinite(total):
        return ReadToken(
            token,
            error=FloatingPointError(
                "the model's logits are NaN or infinite, or nothing that may follow has a finite one: check its "
                "weights, the dtype and logit_bias"
            ),
        )
    logprob, top = choice.logprob[row], choice.top[row]
    if top is not None:
        top = tuple(zip(top[0].tolist(), top[1].tolist(), strict=True))
    return ReadToken(token, None if logprob is None else logprob.item(), top)


def permitted(constraint: Constraint | None, vocabulary: int) -> mx.array | None:
    """The constraint's mask for the next token, checked.

    Raises:
        ValueError: a mask that is none, or that permits nothing.
    """
    mask = None if constraint is None else constraint.mask()
    if mask is None:
        return None
    words = -(-vocabulary // 32)
    if not isinstance(mask, mx.array):
        raise ValueError(f"a constraint's mask must be an mx.array, uint32 [{words}], not {type(mask).__name__}")
    if mask.shape != (words,) or mask.dtype != mx.uint32:
        raise ValueError(f"a constraint's mask must be uint32 [{words}], not {mask.dtype} {list(mask.shape)}")
    if not mx.any(bits(mask, vocabulary)).item():
        raise ValueError("the constraint permits no token: end the request instead")
    return mask
