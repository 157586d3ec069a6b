"""Fixtures of the report's tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("notebook_files", Path(__file__).with_name("notebook_files.py"))
_NOTEBOOK_FILES = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_NOTEBOOK_FILES)


@pytest.fixture(scope="session")
def write_notebook():
    """`write_notebook(path, *cells, parameters=...)`: see notebook_files.py."""
    return _NOTEBOOK_FILES.write
