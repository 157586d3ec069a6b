"""What a cache's arrays look like, known before there is any: the basis of sizes in bytes and of fingerprints."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class ArraySpec:
    """One array of one row.

    Attributes:
        name: "keys", "values", "state0" ...
        shape: the row's shape; without the token axis if `per_token`.
        dtype: MLX's name, such as "bfloat16".
        per_token: whether there is one entry of `shape` a token.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    per_token: bool

    @property
    def nbytes(self) -> int:
        """Bytes of one entry."""
        return math.prod(self.shape) * getattr(mx, self.dtype).size


@dataclass(frozen=True)
class Layout:
    """A cache's kind, its arrays and, for a ring, its window in tokens."""

    kind: str
    arrays: tuple[ArraySpec, ...]
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes that grow with each token (a ring stops growing at its window)."""
        return sum(spec.nbytes for spec in self.arrays if spec.per_token)

    @property
    def by_token(self) -> bool:
        """Whether a span of tokens can be cut out: every array has one entry a token, and none is ever overwritten."""
        return self.window is None and all(spec.per_token for spec in self.arrays)

    @property
    def bytes_fixed(self) -> int:
        """Bytes that are there from the first token on."""
        return sum(spec.nbytes for spec in self.arrays if not spec.per_token)

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) over everything above: equal exactly when stored arrays fit."""
        return hashlib.sha256(json.dumps(self.as_record(), sort_keys=True).encode()).hexdigest()

    def as_record(self) -> dict[str, Any]:
        """Plain JSON data."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Layout:
        """The inverse of `as_record`."""
        specs = tuple(ArraySpec(s["name"], tuple(s["shape"]), s["dtype"], s["per_token"]) for s in record["arrays"])
        return cls(record["kind"], specs, record["window"])


def dtype_name(dtype: mx.Dtype) -> str:
    """MLX's dtype -> its bare name."""
    return str(dtype).rsplit(".", 1)[-1]


def keys_and_values(kind: str, keys: mx.array, values: mx.array, window: int | None = None) -> Layout:
    """The layout of a cache that holds keys [B, H, T, Dk] and values [B, H, T, Dv]."""
    specs = tuple(
        ArraySpec(name, (array.shape[1], array.shape[3]), dtype_name(array.dtype), per_token=True)
        for name, array in (("keys", keys), ("values", values))
    )
    return Layout(kind, specs, window)
