"""A kernel's CUDA text as a file that its launches include.

MLX takes a hash of the whole text at every launch, 0.14 us a kB: 0.66 ms of a decode step of 350 launches. A launch
that names a file by its content has a text of one line.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

from labkit.kernels.artefacts import ArtefactCache, content_key
from labkit.kernels.targets.cuda_text import CudaText


def in_files(text: CudaText) -> CudaText:
    """The same text in two files of the kernels' cache; as it is where no folder can be written or named."""
    try:
        folder = _written(text.header, text.source)
    except OSError:
        return text
    if not str(folder).isascii() or '"' in str(folder):  # the compiler might read its name in another way
        return text
    return replace(
        text,
        header=f'#include "{folder / "header.h"}"\n',
        source=f'#include "{folder / "body.h"}"\n{_asked_for(text)}',
    )


@cache
def _written(header: str, source: str) -> Path:
    def write(folder: Path) -> None:
        (folder / "header.h").write_text(header, encoding="utf-8")
        (folder / "body.h").write_text(source, encoding="utf-8")

    return ArtefactCache().get(content_key("cuda text", header, source), write)


def _asked_for(text: CudaText) -> str:
    """MLX passes an input's shape, strides or dimensions where the text, here its comment, holds their names."""
    names = "|".join(re.escape(name) for name in text.input_names)
    found = re.findall(rf"(?:{names})_(?:shape|strides|ndim)", text.source) if names else []
    return f"// {' '.join(sorted(set(found)))}\n" if found else ""
