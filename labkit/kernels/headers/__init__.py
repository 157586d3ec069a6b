"""Shared header texts, cut into sections: a kernel gets those it uses (`labkit.kernels.header`)."""

from pathlib import Path

from labkit.kernels.header import Header

SHARED = Header.from_file(*sorted(Path(__file__).parent.glob("*.h")))
"""All shared headers as one."""

_TILES = Path(__file__).parent / "tiles"

TILES = Header.from_file(
    *(_TILES / f"{name}.h" for name in ("primitives", "packed_weights", "few_rows", "one_row", "weight_tiles"))
)
"""What matrix kernels stand on, from single instructions to whole tiles, in the order in which one needs the other."""
