"""An mlx-lm cache of a kind that labkit has no class for: kept as it is, with what it can do found out by looking."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from labkit.caches.base import Cache, Unsupported
from labkit.caches.by_row import per_row

# operation -> the method of mlx-lm's class that does it
_METHODS = {"merge": "merge", "extend": "extend", "filter": "filter", "extract": "extract", "prepare": "prepare"}


class Foreign(Cache):
    """A wrapper around `inner`, an object of mlx-lm; a model's module is given `inner` itself."""

    kind = "foreign"

    def __init__(self, inner: Any):
        self.inner = inner
        self._mark: Any = None

    @property
    def supports(self) -> frozenset[str]:
        able = {name for name, method in _METHODS.items() if hasattr(type(self.inner), method)}
        return frozenset(able | {"rollback"} | ({"trim"} if self.is_trimmable() else set()))

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        self.inner.state = value

    @property
    def meta_state(self) -> dict[str, Any]:
        return {}

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def empty(self) -> bool:
        return self.inner.empty()

    def size(self) -> int:
        return self.inner.size()

    @property
    def batch_size(self) -> int:
        return getattr(self.inner, "batch_size", 1)

    def is_trimmable(self) -> bool:
        return self.inner.is_trimmable()

    def trim(self, n: int) -> int:
        if n and not self.is_trimmable():
            raise Unsupported(type(self.inner).__name__, "trim", "mlx-lm's class does not allow it now")
        return self.inner.trim(n) if n else 0

    def prepare(self, **padding: Any) -> None:
        self._method("prepare")(**padding)

    def finalize(self) -> None:
        if hasattr(self.inner, "finalize"):
            self.inner.finalize()

    @classmethod
    def merge(cls, caches: Sequence[Foreign]) -> Foreign:
        return cls(caches[0]._method("merge")([cache.inner for cache in caches]))

    def extend(self, other: Foreign) -> None:
        self._method("extend")(other.inner)

    def filter(self, rows: Any) -> None:
        self._method("filter")(rows)

    def extract(self, row: int) -> Foreign:
        return Foreign(self._method("extract")(row))

    def copy(self) -> Foreign:
        return Foreign(deepcopy(self.inner))

    def _method(self, name: str) -> Any:
        if name not in self.supports:
            raise Unsupported(type(self.inner).__name__, name, "mlx-lm's class has no such method")
        return getattr(self.inner, name)

    def checkpoint(self) -> None:
        self._mark = deepcopy(self.inner)

    def check_commit(self, accepted: Any) -> None:
        super().check_commit(accepted)
        if any(per_row(accepted, self.batch_size)):
            raise Unsupported(type(self.inner).__name__, "commit a part", "only its state before is known")

    def commit(self, accepted: Any) -> None:
        self.check_commit(accepted)
        self.inner, self._mark = self._mark, None

    def _pack(self) -> tuple[dict, dict]:
        raise Unsupported(type(self.inner).__name__, "be stored as bytes", "its arrays have no known layout")

    def _unpack(self, arrays: dict, scalars: dict) -> None:
        raise Unsupported(type(self.inner).__name__, "be read from bytes", "its arrays have no known layout")
