"""An engine's run against the oracle's replay of its log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from labkit.engine import StepRecord
from labkit.parity.replay.compare import differences, same
from labkit.parity.replay.oracle import Oracle
from labkit.parity.replay.recorder import Recording


@dataclass
class Verdict:
    """What a replay found.

    Attributes:
        forwards: forwards that were compared; `decodes` of them gave logits.
        vectors: logit vectors that were compared.
        rows: the most rows in one forward.
        operations: how often each operation on caches was replayed.
        largest: the largest difference of two logits.
        faults: what differs, in words, with the step; empty when the engine is right.
    """

    forwards: int = 0
    decodes: int = 0
    vectors: int = 0
    rows: int = 0
    operations: dict[str, int] = field(default_factory=dict)
    largest: float = 0.0
    faults: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Whether nothing differs."""
        return not self.faults

    def __iadd__(self, other: Verdict) -> Verdict:
        """The findings of another run too."""
        self.forwards += other.forwards
        self.decodes += other.decodes
        self.vectors += other.vectors
        self.rows = max(self.rows, other.rows)
        for name, count in other.operations.items():
            self.operations[name] = self.operations.get(name, 0) + count
        self.largest = max(self.largest, other.largest)
        self.faults += other.faults
        return self

    def record(self) -> dict[str, Any]:
        """JSON data."""
        return {
            "agrees": self.agrees,
            "forwards": self.forwards,
            "decodes": self.decodes,
            "logit_vectors": self.vectors,
            "most_rows": self.rows,
            "operations": dict(sorted(self.operations.items())),
            "largest_logit_difference": self.largest,
            "faults": self.faults,
        }


def replay(log: Sequence[StepRecord], forwards: Sequence[Recording], oracle: Oracle) -> Verdict:
    """Bit for bit: the logits of every decode step and the state of every cache after every forward.

    Args:
        log: the engine's.
        forwards: what was recorded at each of its forwards, in order.
        oracle: mlx-lm on the same weights.
    """
    return _replay(log, forwards, oracle, tolerance=None)


def tolerant_replay(
    log: Sequence[StepRecord], forwards: Sequence[Recording], oracle: Oracle, tolerance: float
) -> Verdict:
    """For a graph that rounds differently: logits within `tolerance` times the largest logit of their vector."""
    return _replay(log, forwards, oracle, tolerance=tolerance)


def _replay(
    log: Sequence[StepRecord], forwards: Sequence[Recording], oracle: Oracle, tolerance: float | None
) -> Verdict:
    verdict, recorded = Verdict(), iter(forwards)
    for record in log:
        logits, caches = oracle.step(record)
        for operation, *_ in record.operations:
            verdict.operations[operation] = verdict.operations.get(operation, 0) + 1
        if record.shape == (0, 0):
            continue
        mine = next(recorded)
        verdict.forwards += 1
        verdict.rows = max(verdict.rows, len(record.rows))
        where = f"step {record.index} ({record.kind} of {len(record.rows)})"
        if logits is not None:
            verdict.decodes += 1
            verdict.vectors += logits.shape[0]
            verdict.faults += [f"{where}: {fault}" for fault in _logit_faults(mine.logits, logits, tolerance, verdict)]
        if tolerance is None:
            for layer, (kind, ours, theirs) in enumerate(zip(mine.kinds, mine.states, caches, strict=True)):
                found = differences(layer, kind, ours, theirs.state)
                verdict.faults += [f"{where}: {difference}" for difference in found]
    if next(recorded, None) is not None:
        verdict.faults.append("the model ran more forwards than the log tells of")
    return verdict


def _logit_faults(ours: mx.array, theirs: mx.array, tolerance: float | None, verdict: Verdict) -> list[str]:
    if ours.shape != theirs.shape:
        return [f"logits are {list(ours.shape)}, mlx-lm's {list(theirs.shape)}"]
    apart = mx.max(mx.abs(ours.astype(mx.float32) - theirs.astype(mx.float32)), axis=-1)
    verdict.largest = max(verdict.largest, mx.max(apart).item())
    if tolerance is None:
        if same(ours, theirs):
            return []
        return [f"logits of row {row} differ by {far:.3g}" for row, far in enumerate(apart.tolist()) if far > 0]
    allowed = tolerance * mx.max(mx.abs(theirs.astype(mx.float32)), axis=-1)
    pairs = zip(apart.tolist(), allowed.tolist(), strict=True)
    return [
        f"logits of row {row} differ by {far:.3g} > {most:.3g}" for row, (far, most) in enumerate(pairs) if far > most
    ]
