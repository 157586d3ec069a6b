"""A small model, and rows that are replayed soon."""

from __future__ import annotations

import pytest

from labkit.caches import contiguous, paged_rows, tail
from labkit.engine import replay as replaying
from labkit.kernels.targets import use_target
from labkit.models.hybrid import recordable
from tests.engine.replay.playing import (
    of_two_layers,
    patience,
    with_room,
)
from tests.models.hybrid.small import DENSE


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return of_two_layers(tmp_path_factory, DENSE)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Rows are replayed from their third step on."""
    monkeypatch.setattr(replaying, "QUIET", 1)
    patience(monkeypatch, 2)
    monkeypatch.setattr(replaying, "FEWEST", 2)
    for module in (tail, recordable, contiguous):
        monkeypatch.setattr(module, "TAIL", 32)
    for module in (tail, paged_rows):
        monkeypatch.setattr(module, "AHEAD", 256)
    with use_target("reference"):
        yield


@pytest.fixture
def roomy(monkeypatch):
    """Buffers are as large without replays as with them: references round by the number of columns."""
    with_room(monkeypatch)
