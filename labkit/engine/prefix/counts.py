"""Counters that several threads may raise."""

from __future__ import annotations

import threading


class Counts:
    """How often each thing happened; what never did is absent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, int] = {}

    def add(self, name: str, n: int = 1) -> None:
        """Count `n` more."""
        with self._lock:
            self._values[name] = self._values.get(name, 0) + n

    def __getitem__(self, name: str) -> int:
        return self._values.get(name, 0)

    def as_dict(self) -> dict[str, int]:
        """A copy, by name in order."""
        with self._lock:
            return dict(sorted(self._values.items()))
