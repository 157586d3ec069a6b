"""Small records, and disk tiers over a test's folder."""

from __future__ import annotations

from pathlib import Path

from labkit.engine.prefix.disk import DiskTier
from labkit.engine.prefix.folder import Folder
from labkit.engine.prefix.record import Record, Tensor, name_of

ROOT, OTHER = "a" * 64, "b" * 64


def key(number: int) -> str:
    return f"{number:064x}"


def name(number: int, part: str = "columns") -> str:
    return name_of(key(number), part)


def record(number: int, size: int = 1000, root: str = ROOT) -> Record:
    about = {"root": root, "key": key(number), "part": "columns", "parent": root, "depth": "1", "bytes": str(size)}
    return Record({"0.keys": Tensor("uint8", (size,), bytes([number % 256]) * size)}, about)


def expected(number: int) -> dict[str, str]:
    return {"root": ROOT, "key": key(number), "part": "columns"}


def disk(path: Path, root: str = ROOT, limit: int = 1 << 20, **options) -> DiskTier:
    return DiskTier(Folder(path / "store", root, lock_seconds=1.0), limit_bytes=limit, **options)


def size_of_folder(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def held(tier: DiskTier, numbers) -> list[int]:
    return [number for number in numbers if tier.read(name(number), expected(number)) is not None]
