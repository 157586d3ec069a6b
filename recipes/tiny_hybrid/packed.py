"""Packed corpora: one xz file a group, its documents separated by the ASCII record separator."""

import lzma
from pathlib import Path

SEPARATOR = "\x1e"


def write(path: Path, texts: list[str]) -> None:
    path.write_bytes(lzma.compress(SEPARATOR.join(texts).encode("utf-8", "replace"), preset=3))


def documents(corpora: Path, group: str) -> list[str]:
    return lzma.decompress((corpora / f"{group}.txt.xz").read_bytes()).decode("utf-8").split(SEPARATOR)
