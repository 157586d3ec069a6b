"""What a side says about a run of positions, in full or only as its best tokens, and how two sides compare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

import numpy as np

# Full vocabularies are compared in float64 a few rows at a time; this bounds one temporary array.
ROWS_TIMES_VOCABULARY = 1 << 21


@dataclass(frozen=True)
class FullLogits:
    """All logits of n positions: `logits` [n, V] float32."""

    logits: np.ndarray

    def __len__(self) -> int:
        return len(self.logits)

    def cut(self, start: int, stop: int) -> FullLogits:
        return FullLogits(self.logits[start:stop])

    def log_normaliser(self) -> np.ndarray:
        """log sum exp of the logits, [n] float64."""
        logits = self.logits.astype(np.float64)
        best = logits.max(-1)
        return best + np.log(np.exp(logits - best[:, None]).sum(-1))

    def at(self, ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Logits of tokens `ids` [n, k], float64 [n, k]."""
        return np.take_along_axis(self.logits, ids, axis=1).astype(np.float64)

    def best(self) -> np.ndarray:
        return self.logits.argmax(-1)

    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k best tokens and their probabilities, [n, k] each."""
        ids = np.argsort(-self.logits, axis=-1, kind="stable")[:, :k]
        return ids, np.exp(np.take_along_axis(self.logits, ids, axis=1) - self.log_normaliser()[:, None])


@dataclass(frozen=True)
class BestLogits:
    """The k best tokens of n positions, and the text's own token.

    Attributes:
        ids: [n, k] token ids, best first (equal logits: lowest id first).
        values: [n, k] float32, their logits.
        normaliser: [n] float64, log sum exp over the whole vocabulary.
        label: [n] float32, the logit of the text's own token, which need not be among the best.
    """

    ids: np.ndarray
    values: np.ndarray
    normaliser: np.ndarray
    label: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, start: int, stop: int) -> BestLogits:
        return BestLogits(*(getattr(self, field.name)[start:stop] for field in fields(self)))

    def log_normaliser(self) -> np.ndarray:
        return self.normaliser

    def at(self, ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Logits of tokens `ids` [n, k], float64 [n, k]; NaN for those that are not among the best (nor the label)."""
        found = np.full(ids.shape, np.nan)
        for mine, value in zip(self.ids.T, self.values.T, strict=True):
            np.copyto(found, value[:, None], where=ids == mine[:, None])
        np.copyto(found, self.label[:, None], where=ids == labels[:, None])
        return found

    def best(self) -> np.ndarray:
        return self.ids[:, 0]

    def top(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k best tokens and their probabilities, [n, k] each."""
        return self.ids[:, :k], np.exp(self.values[:, :k] - self.normaliser[:, None])

    @classmethod
    def of(cls, full: FullLogits, labels: np.ndarray, k: int) -> BestLogits:
        """The k best of full logits."""
        ids = np.argsort(-full.logits, axis=-1, kind="stable")[:, :k]
        values = np.take_along_axis(full.logits, ids, axis=1)
        label = np.take_along_axis(full.logits, labels[:, None], axis=1)[:, 0]
        return cls(ids, values, full.log_normaliser(), label)


Prediction = FullLogits | BestLogits


@dataclass(frozen=True)
class Comparison:
    """Two sides at n positions, arrays [n] each (nats; logits are compared as they are, without normalising).

    Attributes:
        nll_reference, nll_candidate: negative log-likelihood of the text's token.
        kl: KL(reference || candidate). Where a side keeps only its best tokens, the rest of the vocabulary is one
            bucket, which makes this a lower bound (merging outcomes never raises a KL).
        max_difference: largest absolute logit difference over the tokens that both sides know.
        whole: whether both sides knew the whole vocabulary.
        top_reference, top_candidate: best token ids.
        margin_reference, margin_candidate: how much each side prefers its own best token to the other's (NaN: unknown).
        magnitude: largest absolute value of the four logits of those two tokens.
    """

    nll_reference: np.ndarray
    nll_candidate: np.ndarray
    kl: np.ndarray
    max_difference: np.ndarray
    whole: np.ndarray
    top_reference: np.ndarray
    top_candidate: np.ndarray
    margin_reference: np.ndarray
    margin_candidate: np.ndarray
    magnitude: np.ndarray

    def __len__(self) -> int:
        return len(self.kl)

    @property
    def agrees(self) -> np.ndarray:
        return self.top_reference == self.top_candidate

    @classmethod
    def join(cls, parts: Iterable[Comparison]) -> Comparison:
        parts = list(parts)
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))


def aligned(
    reference: Iterable[Prediction], candidate: Iterable[Prediction]
) -> Iterator[tuple[Prediction, Prediction]]:
    """Cut two streams of predictions over the same positions into pieces of equal lengths.

    Raises:
        ValueError: if one stream ends before the other.
    """
    streams = iter(reference), iter(candidate)
    held: list[Prediction | None] = [None, None]
    while True:
        for side in (0, 1):
            if held[side] is None:
                held[side] = next(streams[side], None)
        left, right = held
        if left is None and right is None:
            return
        if left is None or right is None:
            raise ValueError(
                f"the {'reference' if left is None else 'candidate'} predicts fewer positions than the other"
            )
        width = min(len(left), len(right))
        yield left.cut(0, width), right.cut(0, width)
        held = [rest.cut(width, len(rest)) if len(rest) > width else None for rest in (left, right)]


def compare(reference: Prediction, candidate: Prediction, labels: np.ndarray) -> Comparison:
    """Compare two sides at the same n positions; `labels` [n] are the text's own tokens."""
    if isinstance(reference, FullLogits) and isinstance(candidate, FullLogits):
        rows = max(1, ROWS_TIMES_VOCABULARY // reference.logits.shape[1])
        cuts = [slice(start, start + rows) for start in range(0, len(labels), rows)]
        return Comparison.join(
            _compare(reference.cut(cut.start, cut.stop), candidate.cut(cut.start, cut.stop), labels[cut], whole=True)
            for cut in cuts
        )
    return _compare(reference, candidate, labels, whole=False)


def _compare(reference: Prediction, candidate: Prediction, labels: np.ndarray, *, whole: bool) -> Comparison:
    norm_reference, norm_candidate = reference.log_normaliser(), candidate.log_normaliser()
    if whole:
        logits_reference, logits_candidate = (side.logits.astype(np.float64) for side in (reference, candidate))
    else:
        ids = reference.ids if isinstance(reference, BestLogits) else candidate.ids
        logits_reference, logits_candidate = reference.at(ids, labels), candidate.at(ids, labels)
    # Between full logits a NaN is an answer, and a wrong one; elsewhere it stands for a token that was not stored.
    known = ~(np.isnan(logits_reference) | np.isnan(logits_candidate)) | whole
    log_p, log_q = logits_reference - norm_reference[:, None], logits_candidate - norm_candidate[:, None]
    p = np.where(known, np.exp(log_p), 0.0)
    kl = (p * np.where(known, log_p - log_q, 0.0)).sum(-1)
    if not whole:
        kl += _remainder_term(1 - p.sum(-1), 1 - np.where(known, np.exp(log_q), 0.0).sum(-1))

    label_reference, label_candidate = (side.at(labels[:, None], labels)[:, 0] for side in (reference, candidate))
    difference = np.where(known, np.abs(logits_reference - logits_candidate), 0.0).max(-1)
    tops = np.stack([reference.best(), candidate.best()], axis=1)
    pair_reference, pair_candidate = reference.at(tops, labels), candidate.at(tops, labels)
    return Comparison(
        nll_reference=norm_reference - label_reference,
        nll_candidate=norm_candidate - label_candidate,
        kl=np.maximum(kl, 0.0),
        max_difference=np.maximum(difference, np.abs(label_reference - label_candidate)),
        whole=np.full(len(labels), whole),
        top_reference=tops[:, 0],
        top_candidate=tops[:, 1],
        margin_reference=pair_reference[:, 0] - pair_reference[:, 1],
        margin_candidate=pair_candidate[:, 1] - pair_candidate[:, 0],
        magnitude=np.abs(np.concatenate([pair_reference, pair_candidate], axis=1)).max(-1),
    )


def _remainder_term(rest_reference: np.ndarray, rest_candidate: np.ndarray) -> np.ndarray:
    # Both remainders come from 1 - sum: below this they are rounding noise, and their term is far below it.
    floor = 1e-12
    p, q = np.maximum(rest_reference, floor), np.maximum(rest_candidate, floor)
    return p * np.log(p / q)
