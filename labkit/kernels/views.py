"""Arrays of what lies at an address, inside loops: native code takes addresses as whole numbers."""

from __future__ import annotations

import numpy as np
from numba import carray

from labkit.kernels.compiled import inner
from labkit.kernels.vectors import pointer


@inner
def floats(address, count):
    """float32 [count]."""
    return carray(pointer(address), (count,), np.float32)


@inner
def whole_numbers(address, count):
    """int64 [count]."""
    return carray(pointer(address), (count,), np.int64)
