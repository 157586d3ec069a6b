"""Where the files that travel with labkit lie: in a clone beside the package, in an installed wheel inside it."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _folder(name: str) -> Path:
    # A clone keeps data/ and notebooks/ at its top; the wheel carries the same folders inside the package.
    for folder in (_PACKAGE / name, _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(
        f"labkit's folder {name!r} is missing beside {_PACKAGE.name}/: reinstall labkit, or run from a whole clone"
    )


def data_folder() -> Path:
    """The folder of embedded models, held-out texts, goldens, published and measured figures."""
    return _folder("data")


def notebooks_folder() -> Path:
    """The folder of the laboratory's notebooks."""
    return _folder("notebooks")
