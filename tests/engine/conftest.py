"""Loaded tiny models and engines on them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import labkit
from tests.tiny_models import write_checkpoint


@pytest.fixture(scope="session")
def loaded(tmp_path_factory) -> Callable[[str], labkit.LoadedModel]:
    """name of a tiny model (and a graph) -> it, loaded once."""
    folder, cache = tmp_path_factory.mktemp("models"), {}

    def get(name: str, graph: str = "auto") -> labkit.LoadedModel:
        if (name, graph) not in cache:
            path = folder / name
            cache[name, graph] = labkit.load(path if path.exists() else write_checkpoint(path, name), graph=graph)
        return cache[name, graph]

    return get


@pytest.fixture
def engine(loaded) -> labkit.Engine:
    """An engine on the tiny llama, ends ignored by nobody."""
    return labkit.Engine(loaded("llama"))
