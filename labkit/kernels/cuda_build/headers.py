"""What MLX includes before a kernel: its own headers out of its CUDA build, or light stand-ins for them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

_UTILS = "mlx/backend/cuda/device/utils.cuh"
_MARKS = {_UTILS: b"struct LoopedElemToLoc", "mlx/backend/cuda/device/complex.cuh": b"using complex_t"}
_MARKS["mlx/backend/cuda/device/config.h"] = b"#define WARP_SIZE"


@dataclass(frozen=True)
class Headers:
    """Headers by the name under which they are included, and folders where others lie."""

    texts: dict[str, str]
    folders: tuple[Path, ...] = field(default=())


@cache
def light_headers() -> Headers:
    """Stand-ins: what a kernel can see of MLX's header, on the few traits of the standard library that are used.

    CUDA's standard library takes seconds to read, at each compilation.
    """
    text = Path(__file__).with_name("light_headers.h").read_text()
    return Headers({_UTILS: text, "cooperative_groups.h": "namespace cooperative_groups {}\n"})


def mlx_headers(folder: Path) -> Headers:
    """MLX's own, out of an unpacked or installed CUDA build of MLX.

    Args:
        folder: the one that is called `mlx`, with `lib/libmlx.so` and `include/cccl`.

    Raises:
        ValueError: that library has no such headers in it.
    """
    library = (folder / "lib" / "libmlx.so").read_bytes()
    texts = {}
    for name, mark in _MARKS.items():
        # The library holds each as one string that ends with a zero, and begins with its copyright.
        place = library.find(mark)
        if place < 0:
            raise ValueError(f"{folder / 'lib' / 'libmlx.so'} holds no {name}: it is no CUDA build of MLX")
        begin, end = library.rfind(b"\0", 0, place) + 1, library.find(b"\0", place)
        texts[name] = re.sub(r"[^\x00-\x7f]", " ", library[begin:end].decode(errors="replace"))
    return Headers(texts, (folder / "include" / "cccl",))
