"""Each barrier of each kernel, taken out: check mode must find that it is gone, or it need not be there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from labkit.kernels import simulator
from labkit.kernels.registry import Entry, all_entries

BARRIER = re.compile(r"\b(?:threadgroup|simdgroup)_barrier\([^;]*\);")


def removals() -> Iterator:
    """(kernel, "source" or "header", place of a barrier in it), the first of each mechanism for every day. (Where all
    threadgroups live at once a barrier of the whole grid goes every day: `test_persistent`.)"""
    sampled = {entry.mechanism for entry in all_entries() if entry.resident}
    for entry in all_entries():
        for part in ("source", "header"):
            text = getattr(entry.kernel.text, part)
            for match in BARRIER.finditer(text):
                marks = [pytest.mark.nightly] if entry.mechanism in sampled else []
                sampled.add(entry.mechanism)
                line = text.count("\n", 0, match.start()) + 1
                yield pytest.param(entry, part, match.span(), id=f"{entry.name}-{part}-{line}", marks=marks)


@pytest.mark.parametrize(("entry", "part", "span"), list(removals()))
def test_a_removed_barrier_is_found(entry: Entry, part: str, span: tuple[int, int]) -> None:
    begin, end = span
    whole = getattr(entry.kernel.text, part)
    without = replace(entry.kernel.text, **{part: f"{whole[:begin]};{whole[end:]}"})
    for case in entry.cases:
        run = simulator.run(without, case.make(entry.dtypes[0]), check=True, resident=entry.resident)
        if run.faults:
            return
    pytest.fail(f"{whole[begin:end]} of {entry.name} can go: check mode finds nothing in any case")


def test_every_mechanism_with_barriers_is_sampled() -> None:
    every_day = {p.values[0].mechanism for p in removals() if not p.marks}
    assert every_day == {p.values[0].mechanism for p in removals() if not p.values[0].resident}
