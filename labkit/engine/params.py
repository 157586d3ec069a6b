"""How tokens are chosen and when a generation ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from operator import index

GREEDY_BELOW = 1e-6
"""Temperatures below which nothing is drawn: logits divided by them would leave the range of fp32."""

LARGEST = 1_000_000
"""Temperatures, penalties and biases at most: a logit is some tens."""


@dataclass(frozen=True)
class SamplingParams:
    """Options of one request, checked when made. Names, meaning and order are mlx-lm's.

    Logits pass through logit_bias, the repetition, presence and frequency penalties (each looks at the last tokens of
    prompt and answer), then as log-probabilities through top_p, min_p, xtc, top_k, and are divided by the temperature.

    Attributes:
        temperature: 0 takes the most likely token, and so does whatever is below `GREEDY_BELOW`; at most `LARGEST`.
        top_p: keep the most likely tokens that together reach this probability; 1 (or 0) keeps all.
        top_k: keep this many tokens; 0 keeps all.
        min_p: drop tokens below this share of the most likely one's probability.
        min_tokens_to_keep: tokens that min_p never drops.
        xtc_probability: chance, at each token, of dropping all but the least likely of the tokens above the threshold.
        xtc_threshold: probability above which xtc considers a token, at most 0.5.
        repetition_penalty: divides (or multiplies, below 0) the logits of recent tokens; None or 1 for none. All
            penalties lie within `LARGEST`: beyond, logits would leave the range of fp32.
        repetition_context_size: tokens that count as recent for it.
        presence_penalty: subtracted once from the logits of recent tokens.
        presence_context_size: tokens that count as recent for it.
        frequency_penalty: subtracted for every occurrence among the recent tokens.
        frequency_context_size: tokens that count as recent for it.
        logit_bias: token -> what is added to its logit, at most `LARGEST`; -inf forbids it.
        seed: of the random draws; the draw at a step depends on (seed, step) alone. None: drawn once and reported.
        max_tokens: tokens to generate at most.
        stop: strings that end the text; nothing of them is shown.
        stop_token_ids: tokens that end the text, besides the model's own.
        ignore_eos: go on past the model's own end tokens.
        logprobs: None, or how many alternatives to report beside each token's log-probability (0: only its own).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.0
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    seed: int | None = None
    max_tokens: int = 256
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)
        try:
            put("stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
            put("stop_token_ids", tuple(self.stop_token_ids))
        except TypeError as error:
            raise ValueError(f"stop and stop_token_ids must be sequences: {error}") from error
        if self.logit_bias is not None:
            try:
                put("logit_bias", {index(token): float(bias) for token, bias in self.logit_bias.items()})
            except (AttributeError, TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"logit_bias must map token ids to numbers, not {self.logit_bias!r}") from error
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")
        self._in_range("temperature", 0, LARGEST)
        if self.temperature < GREEDY_BELOW:
            put("temperature", 0.0)
        self._in_range("top_p", 0, 1)
        self._in_range("min_p", 0, 1)
        self._in_range("xtc_probability", 0, 1)
        self._in_range("xtc_threshold", 0, 0.5)
        self._in_range("repetition_penalty", 1 / LARGEST, LARGEST, optional=True)
        self._in_range("presence_penalty", -LARGEST, LARGEST)
        self._in_range("frequency_penalty", -LARGEST, LARGEST)
        self._whole("top_k", 0)
        self._whole("min_tokens_to_keep", 1)
        self._whole("max_tokens", 1)
        self._whole("logprobs", 0, optional=True)
        self._whole("seed", 0, optional=True)
        for name in ("repetition_context_size", "presence_context_size", "frequency_context_size"):
            self._whole(name, 1)
        if not all(isinstance(text, str) and text and is_unicode(text) for text in self.stop):
            raise ValueError(f"stop must be non-empty strings of valid Unicode, not {list(self.stop)!r}")
        tokens = [whole(token) for token in self.stop_token_ids]
        if any(token is None or token < 0 for token in tokens):
            raise ValueError(f"stop_token_ids must be token ids, not {list(self.stop_token_ids)!r}")
        put("stop_token_ids", tuple(tokens))
        if self.logit_bias and not all(token >= 0 and bias <= LARGEST for token, bias in self.logit_bias.items()):
            raise ValueError(f"logit_bias must map token ids to numbers of at most {LARGEST}, not {self.logit_bias!r}")

    def _in_range(self, name: str, low: float, high: float, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        number = finite(value)
        if number is None or not low <= number <= high:
            raise ValueError(f"{name} must be a finite number from {low} to {high}, not {value!r}")
        object.__setattr__(self, name, number)

    def _whole(self, name: str, low: int, *, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        number = whole(value)
        if number is None or number < low:
            raise ValueError(f"{name} must be a whole number from {low} on, not {value!r}")
        object.__setattr__(self, name, number)


def finite(value: object) -> int | float | None:
    """A number of Python's or of NumPy's as Python's own; None for what is none, or is none of fp64."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = value if isinstance(value, int) else float(value)
        return number if math.isfinite(number) else None
    except OverflowError:
        return None


def whole(value: object) -> int | None:
    """A whole number of any type that is one, as Python's own; None for others, True and False among them."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return index(value)


def is_unicode(text: str) -> bool:
    """Whether a text can be written down: lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
