"""The contracts are checked on a tiny hybrid: attention and recurrent layers side by side."""

from __future__ import annotations

import pytest

import labkit
from tests.tiny_models import write_checkpoint


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory) -> labkit.LoadedModel:
    """A tiny random hybrid, loaded as a user loads it."""
    return labkit.load(write_checkpoint(tmp_path_factory.mktemp("hybrid"), "hybrid"))
