"""Launches whose threadgroups wait for each other: how many live at once, and the refusal of more.

Nothing starts a threadgroup while those that live wait for it, so a grid that does not fit hangs the GPU. CUDA starts
the threadgroups of a grid that fits at once, if nothing else holds the multiprocessors for good: never two such
launches side by side. Metal promises no progress across threadgroups at all.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache

from labkit.kernels.cuda_build.usage import Usage
from labkit.kernels.signature import Launch, threadgroup_size

H200 = 132
"""Multiprocessors of an H100 (SXM) or H200."""

MOST_REGISTERS, MOST_SHARED = 255, 48 * 1024
"""What a thread can have of registers, and a threadgroup of memory declared in the text, on any NVIDIA GPU."""

NOT_ON_METAL = (
    "its threadgroups wait for each other, and Metal does not promise that those which have not begun will begin "
    "meanwhile: use the plain form, launch by launch"
)

_MULTIPROCESSOR_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT


def always(threads: int) -> int:
    """Threadgroups of `threads` threads that fit on one multiprocessor whatever the compiler makes of their text."""
    return Usage(MOST_REGISTERS, 0, 0, 0, MOST_SHARED).groups(threads)


@cache
def multiprocessors() -> int:
    """Of the GPU that MLX computes on, or of the part of it that this process was given.

    Raises:
        RuntimeError: NVIDIA's driver does not say.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"a grid-wide barrier needs the number of multiprocessors: {error}") from error
    device, count = ctypes.c_int(), ctypes.c_int()
    failed = (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDeviceGetAttribute(ctypes.byref(count), _MULTIPROCESSOR_COUNT, device)
    )
    if failed or count.value < 1:
        raise RuntimeError(f"a grid-wide barrier needs the number of multiprocessors: the driver gave error {failed}")
    return count.value


def check_resident(name: str, launch: Launch, here: int) -> None:
    """Refuse a grid that might not live at once on `here` multiprocessors.

    Raises:
        ValueError: more threadgroups than fit.
    """
    group = threadgroup_size(launch)
    groups = math.prod(-(-size // part) for size, part in zip(launch.grid, group, strict=True))
    most = always(math.prod(group)) * here
    if groups > most:
        raise ValueError(
            f"kernel {name}: its {groups} threadgroups of {math.prod(group)} threads wait for each other, and only "
            f"{most} are sure to live at once on {here} multiprocessors: launch at most {most}"
        )
