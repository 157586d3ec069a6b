"""What this machine is: the device MLX computes on, its memory and limits, and where labkit may keep files."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import psutil

Kind = Literal["metal", "cuda", "cpu"]

CACHE_VARIABLE = "LABKIT_CACHE_DIR"


@dataclass(frozen=True)
class Device:
    """The device that MLX computes on.

    Attributes:
        kind: the back end, "metal", "cuda" or "cpu".
        name: the chip's own name, as the system gives it.
        memory_bytes: memory that the device can address in all (unified memory on a Mac, RAM on a CPU).
        working_set_bytes: memory that arrays should stay within (Metal's recommended working set; else `memory_bytes`).
        dtype: the activations' default dtype, as a name: "float32" on a CPU, where MLX's bfloat16 is several times
            slower, "bfloat16" on a GPU.
    """

    kind: Kind
    name: str
    memory_bytes: int
    working_set_bytes: int
    dtype: str


def cache_root() -> Path:
    """The one folder under which labkit keeps everything that it can make again.

    `LABKIT_CACHE_DIR` names it; without that, the platform's usual place (`~/Library/Caches/labkit` on macOS,
    `$XDG_CACHE_HOME/labkit` or `~/.cache/labkit` elsewhere). The folder may not exist yet.
    """
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named).expanduser().resolve()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "labkit"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "labkit"


def cache_folder(kind: str) -> Path:
    """A folder for one kind of cached file ("kernels", "models" ...), made when first asked for.

    Raises:
        ValueError: if `kind` is not one plain name.
        OSError: if the folder cannot be made; the message names `LABKIT_CACHE_DIR`.
    """
    if not kind or kind != Path(kind).name or kind.startswith("."):
        raise ValueError(f"a cache kind is one plain folder name such as 'kernels', not {kind!r}")
    folder = cache_root() / kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"cannot make the cache folder {folder} ({error.strerror}): "
            f"set {CACHE_VARIABLE} to a folder that can be written"
        ) from error
    return folder


@cache
def this_device() -> Device:
    """The device that MLX's default stream computes on."""
    import mlx.core as mx

    total = psutil.virtual_memory().total
    if mx.default_device().type != mx.gpu:
        return Device("cpu", _processor_name(), total, total, "float32")
    info = mx.device_info() if hasattr(mx, "device_info") else {}
    memory = int(info.get("memory_size") or info.get("total_memory") or total)
    kind: Kind = "metal" if mx.metal.is_available() else "cuda"
    working_set = int(info.get("max_recommended_working_set_size") or memory)
    return Device(kind, str(info.get("device_name") or kind), memory, working_set, "bfloat16")


def _processor_name() -> str:
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def installed_versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Installed versions of Python packages; None where one is absent."""
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def find_program(*names: str) -> str | None:
    """The path of the first of `names` that is on PATH, or None."""
    return next((path for name in names if (path := shutil.which(name))), None)
