"""The contracts are checked on a tiny hybrid: attention and recurrent layers side by side."""

from __future__ import annotations

import mlx.core as mx
import pytest

import labkit
from tests.tiny_models import write_checkpoint

GRAPHS = ["adapter", "native"] if mx.default_device() == mx.cpu else ["adapter"]


@pytest.fixture(scope="session", params=GRAPHS)
def hybrid(request, tmp_path_factory) -> labkit.LoadedModel:
    """A tiny random hybrid, by every graph that computes its heads of 8 here."""
    return labkit.load(write_checkpoint(tmp_path_factory.mktemp("hybrid"), "hybrid"), graph=request.param)
