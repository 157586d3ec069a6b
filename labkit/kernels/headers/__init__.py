"""Shared header texts, cut into sections: a kernel gets those it uses (`labkit.kernels.header`)."""

from pathlib import Path

from labkit.kernels.header import Header

SHARED = Header.from_file(*sorted(Path(__file__).parent.glob("*.h")))
"""All shared headers as one."""
