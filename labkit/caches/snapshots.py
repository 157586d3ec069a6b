"""Caches as bytes: safetensors, whose header carries the class, the scalars and the layout with its fingerprint."""

from __future__ import annotations

import io
import json
import zlib
from typing import Any

import mlx.core as mx

from labkit.caches.layout import Layout

FORMAT = "labkit-cache-2"


def to_bytes(name: str, layout: Layout | None, arrays: dict[str, mx.array], scalars: dict[str, Any]) -> bytes:
    """One cache -> bytes. Evaluates the arrays."""
    header = {
        "format": FORMAT,
        "class": name,
        "scalars": json.dumps(scalars),
        "layout": json.dumps(layout.as_record()) if layout else "",
        "fingerprint": layout.fingerprint if layout else "",
    }
    header["check"] = _check(header, arrays)
    buffer = io.BytesIO()
    mx.save_safetensors(buffer, arrays, header)
    return buffer.getvalue()


def from_bytes(name: str, layout: Layout | None, data: bytes) -> tuple[dict[str, mx.array], dict, Layout | None]:
    """Bytes -> arrays, scalars, layout.

    Raises:
        ValueError: data that are damaged, or written by another class or for another layout.
    """
    try:
        arrays, header = mx.load(io.BytesIO(data), format="safetensors", return_metadata=True)
        mx.eval(arrays)
        if header.get("format") != FORMAT:
            raise ValueError(f"format {header.get('format')!r}, not {FORMAT!r}")
        if header.pop("check", None) != _check(header, arrays):
            raise ValueError("their header is damaged")
        scalars = json.loads(header["scalars"])
        stored = Layout.from_record(json.loads(header["layout"])) if header["layout"] else None
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"these {len(data)} bytes are no cache snapshot: {error}") from error
    if header.get("class") != name:
        raise ValueError(f"the snapshot is of a {header.get('class')}, not of a {name}")
    if layout is not None and stored is not None and stored.fingerprint != layout.fingerprint:
        raise ValueError(f"the snapshot's layout {stored} is not this model's {layout}")
    return arrays, scalars, stored


def _check(header: dict[str, str], arrays: dict[str, mx.array]) -> str:
    """A checksum of everything but the arrays' own bytes: names, shapes, dtypes, scalars, layout."""
    described = {name: [list(array.shape), str(array.dtype)] for name, array in arrays.items()}
    return f"{zlib.crc32(json.dumps([header, described], sort_keys=True).encode()):08x}"
