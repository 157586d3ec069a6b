"""Devices that tests may need, exact products of floats, and a record of outcomes that survives a run cut short."""

from __future__ import annotations

import json
import os
from pathlib import Path

import mlx.core as mx
import pytest

# MLX reads this once, at its first product. With it on, an NVIDIA GPU rounds float32 operands to 10 bits: the logits of
# `small.py`'s models move by 0.02 and more.
os.environ["MLX_ENABLE_TF32"] = "0"

OUTCOMES = "LABKIT_TEST_OUTCOMES"
"""The variable that names a file for one JSON line a test, written as soon as it ends."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`-n N --dist loadgroup`: one process takes the tests of one shape and dtype, and compiles their kernels once."""
    for item in items:
        if item.path.name == "test_cuda.py":
            case = item.callspec.id if hasattr(item, "callspec") else ""
            item.add_marker(pytest.mark.xdist_group(f"{item.originalname} {case.split('-')[0]} {case.rsplit('-')[-1]}"))


@pytest.fixture
def cuda_device():
    """Skips where MLX has no CUDA device."""
    if mx.default_device().type != mx.gpu or mx.metal.is_available():
        pytest.skip("no CUDA device that MLX can use")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line for each test that ran or failed to start: its name, outcome, seconds, measured values and message."""
    path, within_worker = os.environ.get(OUTCOMES), os.environ.get("PYTEST_XDIST_WORKER")
    if not path or within_worker or (report.when != "call" and report.outcome == "passed"):
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    message = "" if report.passed else (crash.message if crash else str(report.longrepr))
    line = {
        "test": report.nodeid.split("::", 1)[-1],
        "outcome": report.outcome,
        "seconds": round(report.duration, 1),
        **dict(report.user_properties),
        **({"message": message[:600]} if message else {}),
    }
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
