"""A kernel's counted traffic against the budget stored beside it."""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels import simulator
from labkit.kernels.registry import Case, Entry, write_budget
from labkit.kernels.simulator import Traffic


def trace(entry: Entry, dtype: mx.Dtype | None = None, case: Case | None = None) -> Traffic:
    """Count what one case moves; by default the first case in the first dtype."""
    dtype = dtype or entry.dtypes[0]
    mx.random.seed(0)
    launch = (case or entry.cases[0]).make(dtype)
    return simulator.run(entry.kernel.text, launch, check=True, resident=entry.resident).traffic


def over_budget(counts: dict[str, int], budget: dict[str, int], slack: float = 0.0) -> list[str]:
    """The counts that exceed their bound by more than a share of `slack`, in words."""
    return [
        f"{name} {counts[name]:,} > {bound:,}" for name, bound in budget.items() if counts[name] > bound * (1 + slack)
    ]


def store_budgets(entry: Entry) -> None:
    """Take what the first case moves today as the budget, in every dtype: a change that moves more then fails."""
    for dtype in entry.dtypes:
        write_budget(entry, dtype, trace(entry, dtype).summary())
