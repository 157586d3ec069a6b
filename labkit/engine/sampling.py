"""From logits to the next token, on the device.

A row's draw depends on its seed, its step and its own logits alone: each row has a key of its own, made by hashing
(seed, step), so neither neighbours nor the shape of the batch can change it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx

from labkit.engine import nucleus
from labkit.engine.kernel_draws import Options, draws
from labkit.engine.params import SamplingParams
from labkit.kernels.targets import target_in_use

LONGEST_CONTEXT = (1 << 31) - 1
"""Tokens that penalties look at, at most: MLX counts elements of an axis in int32."""

KERNELS = ("kernels",)
"""The group of rows that kernels choose for."""


class Choice(NamedTuple):
    """The chosen tokens, unread: token uint32 [B]; total [B], the log of the sum of exp(logits), or the token's
    log-probability where kernels chose it: either is finite unless the logits are broken; for each row its logprob [1]
    and best alternatives, if asked for; for rows whose token could not be chosen, why."""

    token: mx.array
    total: mx.array
    logprob: list[mx.array | None]
    top: list[tuple[mx.array, mx.array] | None]
    failed: dict[int, Exception]

    @property
    def plain(self) -> bool:
        """Whether nothing was asked for but the tokens."""
        return not any(array is not None for array in self.logprob)

    @classmethod
    def given(cls, tokens: Sequence[int]) -> Choice:
        """Tokens that were not chosen: the last ones of prompts."""
        rows = len(tokens)
        return cls(mx.array(list(tokens), dtype=mx.uint32), mx.zeros((rows,)), [None] * rows, [None] * rows, {})

    def take(self, rows: Sequence[int]) -> Choice:
        """Some of the rows."""
        index = mx.array(list(rows), dtype=mx.int32)
        failed = {new: self.failed[old] for new, old in enumerate(rows) if old in self.failed}
        pick = lambda items: [items[row] for row in rows]
        return Choice(self.token[index], self.total[index], pick(self.logprob), pick(self.top), failed)

    def __add__(self, other: Choice) -> Choice:
        """These rows, then those of `other`."""
        rows = len(self.logprob)
        return Choice(
            mx.concatenate([self.token, other.token]),
            mx.concatenate([self.total, other.total.astype(self.total.dtype)]),
            self.logprob + other.logprob,
            self.top + other.top,
            {**self.failed, **{rows + row: error for row, error in other.failed.items()}},
        )

    def arrays(self) -> list[mx.array]:
        """What to evaluate."""
        extra = [array for array in self.logprob if array is not None]
        return [self.token, self.total, *extra, *(array for pair in self.top if pair for array in pair)]


class RowSampler:
    """One row's way from logits to a token: its options, its key and the recent tokens that penalties look at."""

    def __init__(
        self, params: SamplingParams, seed: int, before: Sequence[int] = (), xtc_special_tokens: Sequence[int] = ()
    ):
        from mlx_lm.sample_utils import make_logits_processors

        self.params, self.seed = params, seed
        self._special = list(xtc_special_tokens)
        contexts = params.repetition_context_size, params.presence_context_size, params.frequency_context_size
        repetition, presence, frequency = (min(size, LONGEST_CONTEXT) for size in contexts)
        self._processors = make_logits_processors(
            params.logit_bias,
            params.repetition_penalty,
            repetition,
            params.presence_penalty,
            presence,
            params.frequency_penalty,
            frequency,
        )
        self._context = max(repetition, presence, frequency) if self._processors else 0
        self._recent = mx.array(list(before)[-self._context :], dtype=mx.int32) if self._context else None

    @property
    def together(self) -> tuple[float, ...] | None:
        """What rows must have in common to go through one computation; None for a row that goes by itself."""
        p = self.params
        if self._processors or p.logprobs is not None or p.xtc_probability > 0:
            return None
        return () if p.temperature == 0 else (p.temperature, p.top_p, p.min_p, p.min_tokens_to_keep, p.top_k)

    @cached_property
    def for_kernels(self) -> Options | None:
        """What kernels need to choose for this row; None for a row that wants what they do not give."""
        p = self.params
        if self._processors or p.logprobs is not None or p.xtc_probability > 0:
            return None
        if p.temperature == 0:
            return Options(0.0, 0, 1.0, 0.0, 0)
        if p.min_p > 0 and p.min_tokens_to_keep > 1:
            return None
        seed = int.from_bytes(hashlib.blake2b(str(self.seed).encode(), digest_size=8).digest(), "little")
        return Options(p.temperature, p.top_k, p.top_p, p.min_p, seed)

    def __call__(
        self, logits: mx.array, fed: mx.array, step: int, mask: mx.array | None = None
    ) -> tuple[mx.array, mx.array, mx.array | None, tuple[mx.array, mx.array] | None]:
        """The token of one row.

        Args:
            logits: [1, V].
            fed: the token that gave these logits, int [1].
            step: number of the token to choose.
            mask: permitted tokens as bits, uint32 [ceil(V / 32)], lowest bit first.

        Returns:
            token [1], the log of the sum of exp(logits) [1], the token's log-probability [1] or None,
            (tokens [k], log-probabilities [k]) or None.
        """
        if self._context:
            self._recent = mx.concatenate([self._recent, fed.astype(mx.int32)])[-self._context :]
            for process in self._processors:
                logits = process(self._recent, logits)
        if mask is not None:
            logits = mx.where(bits(mask, logits.shape[-1]), logits, -mx.inf)
        total = mx.logsumexp(logits, axis=-1, keepdims=True)
        logprobs = logits - total
        token = draw(self.filtered(logprobs, step), [self], [step])
        if self.params.logprobs is None:
            return token, total[:, 0], None, None
        return token, total[:, 0], mx.take_along_axis(logprobs, token[:, None], axis=-1)[0], self._best(logprobs[0])

    def filtered(self, logprobs: mx.array, step: int) -> mx.array:
        """The log-probabilities [B, V] from which rows with these options draw, unnormalised, temperature included."""
        p = self.params
        if p.temperature == 0:
            return logprobs
        from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

        if 0 < p.top_p < 1:
            logprobs = (nucleus.apply_top_p if on_host() else apply_top_p)(logprobs, p.top_p)
        if p.min_p > 0:
            logprobs = apply_min_p(logprobs, p.min_p, min(p.min_tokens_to_keep, logprobs.shape[-1]))
        if p.xtc_probability > 0:
            logprobs = self._exclude_top_choices(logprobs, keys(self.seed, step)[1])
        if 0 < p.top_k < logprobs.shape[-1]:
            logprobs = (nucleus.apply_top_k if on_host() else apply_top_k)(logprobs, p.top_k)
        return logprobs * (1 / p.temperature)

    def _exclude_top_choices(self, logprobs: mx.array, key: mx.array) -> mx.array:
        probabilities = mx.softmax(logprobs, axis=-1)
        above = mx.where(probabilities > self.params.xtc_threshold, probabilities, mx.inf)
        excluded = probabilities > above.min(axis=-1, keepdims=True)
        if self._special:
            excluded[..., mx.array(self._special)] = False
        applies = mx.random.uniform(key=key) <= self.params.xtc_probability
        return mx.where(applies & excluded, -mx.inf, logprobs)

    def _best(self, logprobs: mx.array) -> tuple[mx.array, mx.array] | None:
        k = min(self.params.logprobs, logprobs.shape[-1])
        if k == 0:
            return None
        best = mx.array(nucleus.best(logprobs, k), dtype=mx.uint32) if on_host() else mx.argsort(-logprobs)[:k]
        return best, logprobs[best]


def choose(
    logits: mx.array,
    fed: mx.array,
    rows: Sequence[RowSampler],
    steps: Sequence[int],
    masks: Sequence[mx.array | None],
) -> Choice:
    """The next token of every row; logits [B, V], fed int [B]. A row whose options fail on these logits fails alone.

    Where kernels run, two launches choose for all rows but those that ask for log-probabilities, penalties or XTC.
    Otherwise rows with the same options go through them together, and the maximum is taken over log-probabilities, not
    logits, as mlx-lm does: in 16 bits the two may round a near tie differently.
    """
    by_kernels = target_in_use() is not None
    groups: dict[object, list[int]] = {}
    for i, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        alike = row.together if mask is None else None
        if by_kernels and row.for_kernels is not None:
            alike = KERNELS
        groups.setdefault(i if alike is None else alike, []).append(i)
    if len(groups) == 1 and isinstance(next(iter(groups)), tuple):
        return _choose_alike(next(iter(groups)), logits, rows, steps, masks)
    parts = []
    for alike, members in groups.items():
        if isinstance(alike, tuple):
            chosen = mx.array(members, dtype=mx.int32)
            of_members = ([of_rows[i] for i in members] for of_rows in (rows, steps, masks))
            parts.append(_choose_alike(alike, logits[chosen], *of_members))
        else:
            i = members[0]
            parts.append(_choose_alone(logits[i : i + 1], fed[i : i + 1], rows[i], steps[i], masks[i]))
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    order = [i for members in groups.values() for i in members]
    return whole if order == sorted(order) else whole.take([order.index(i) for i in range(len(rows))])


def _choose_alike(
    alike: tuple,
    logits: mx.array,
    rows: Sequence[RowSampler],
    steps: Sequence[int],
    masks: Sequence[mx.array | None],
) -> Choice:
    if alike is KERNELS:
        token, logprob = draws(logits, [row.for_kernels for row in rows], steps, masks)
        return Choice(token, logprob, [None] * len(rows), [None] * len(rows), {})
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    token = draw(rows[0].filtered(logits - total, steps[0]), rows, steps)
    return Choice(token, total[:, 0], [None] * len(rows), [None] * len(rows), {})


def _choose_alone(logits: mx.array, fed: mx.array, row: RowSampler, step: int, mask: mx.array | None) -> Choice:
    try:
        token, total, logprob, best = row(logits, fed, step, mask)
    except Exception as error:  # whatever a processor raises; its frames would keep the logits alive
        failed = {0: error.with_traceback(None)}
        return Choice(mx.zeros((1,), mx.uint32), mx.zeros((1,), logits.dtype), [None], [None], failed)
    return Choice(token, total, [logprob], [best], {})


def draw(scores: mx.array, rows: Sequence[RowSampler], steps: Sequence[int]) -> mx.array:
    """One token a row, uint32 [B], with probabilities softmax(scores [B, V]): the largest of scores plus Gumbel noise,
    each row's noise from its own key. At temperature 0, the largest score."""
    if rows[0].params.temperature == 0:
        return mx.argmax(scores, axis=-1)
    own = mx.array([_words(row.seed, step)[:2] for row, step in zip(rows, steps, strict=True)], dtype=mx.uint32)
    uniform = mx.vmap(lambda key: mx.random.uniform(shape=(scores.shape[-1],), key=key))(own)
    return mx.argmax(scores - mx.log(-mx.log(uniform)), axis=-1)


def on_host() -> bool:
    """Whether logits lie where the host computes: it may look at them at no price."""
    return mx.default_device().type != mx.gpu


def keys(seed: int, step: int) -> tuple[mx.array, mx.array]:
    """Two independent keys (uint32 [2]) for the draws of one row at one step."""
    words = _words(seed, step)
    return mx.array(words[:2], dtype=mx.uint32), mx.array(words[2:], dtype=mx.uint32)


def _words(seed: int, step: int) -> list[int]:
    digest = hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=16).digest()
    return [int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4)]


def bits(mask: mx.array, size: int) -> mx.array:
    """uint32 words -> bool [size]."""
    index = mx.arange(size)
    return (mx.right_shift(mask[index // 32], (index % 32).astype(mx.uint32)) & 1).astype(mx.bool_)
