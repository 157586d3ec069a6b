"""The rate of a core's multipliers: chains of fused multiply-adds in registers, and nothing else."""

from __future__ import annotations

import time

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

from labkit.kernels.vectors import FLOATS, LANES, Emitter

CHAINS, TURNS = 12, 50_000


@intrinsic
def _chains(context, turns, place):
    def generate(context, builder, signature, args):
        e = Emitter(builder)
        registers = [e.register(e.zero()) for _ in range(CHAINS)]
        one = e.load(args[1], FLOATS)
        with e.loop(args[0]):
            for register in registers:
                register.set(e.fma(register.get(), one, one))
        total = registers[0].get()
        for register in registers[1:]:
            total = builder.fadd(total, register.get())
        e.store(total, args[1])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@numba.njit(nogil=True)
def _run(turns, place):
    _chains(turns, place.ctypes.data)


def multiply_add_rate(rounds: int = 15) -> float:
    """float32 operations a second of one thread, the best of `rounds`; a multiply-add is two."""
    place, best = np.zeros(LANES, np.float32), float("inf")
    _run(1, place)
    for _ in range(rounds):
        place[:] = 0
        begin = time.perf_counter()
        _run(TURNS, place)
        best = min(best, time.perf_counter() - begin)
    return TURNS * CHAINS * LANES * 2 / best
