"""What a call takes of its process at most, page by page: arrays of MLX, of NumPy, of compiled loops, and all else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def can_measure() -> bool:
    """Whether the system lets a process reset its own high-water mark (Linux)."""
    return RESET.exists()


def raised(call: Callable[[], Any]) -> int | None:
    """Bytes by which `call` raised the process at most; None where the system does not say.

    Free memory that the allocators still hold is taken first, and not counted: give MLX's pool back before.
    """
    if not can_measure():
        return None
    RESET.write_text("5")  # the mark begins anew
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    return 1024 * next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(name))
