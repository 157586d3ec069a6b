"""On Metal, the model stays resident while an engine lives, as mlx-lm has it."""

from __future__ import annotations

import contextlib

import mlx.core as mx


class WiredMemory:
    """Raises the limit of wired memory to the device's working set; nothing on other devices."""

    def __init__(self) -> None:
        self._before: int | None = None
        with contextlib.suppress(AttributeError):
            limit = mx.device_info().get("max_recommended_working_set_size") if mx.metal.is_available() else None
            self._before = mx.set_wired_limit(limit) if limit else None

    def release(self) -> None:
        """Set the limit back, once."""
        if self._before is not None:
            mx.synchronize()
            mx.set_wired_limit(self._before)
            self._before = None
