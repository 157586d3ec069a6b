"""Checkpoints on disk for the loading tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A whole tiny llama checkpoint; copy it before you damage it."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")
