"""Recordings replayed launch by launch on a CPU's memory: what the graphs are held to, and how they are tested."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from labkit.kernels.recording.machine import Resolve
from labkit.kernels.recording.memory import as_bytes, from_bytes
from labkit.kernels.recording.program import Node, Program
from labkit.kernels.targets import run_on

Built = list[tuple[Node, list[int], list[int]]]


class OnHost:
    """Launches on one of the targets that compute on a CPU.

    Args:
        target: "reference", "native" or "simulator".
    """

    def __init__(self, target: str):
        self._target = target

    def addresses(self, arrays: Sequence[mx.array]) -> list[int]:
        """Where evaluated arrays lie."""
        some = [_bytes(array) for array in arrays]  # all live until each has told
        return [part.ctypes.data if part.size else 0 for part in some]

    def copies(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """Evaluated arrays of the same values in memory of their own."""
        made = [from_bytes(mx.array(_bytes(array)), array) for array in arrays]
        mx.eval(made)
        return made

    def prepare(self, program: Program) -> Program:
        """Nothing is to be prepared."""
        return program

    def build(self, prepared: Program, resolve: Resolve) -> Built:
        """The launches and their addresses."""
        return [(node, *_addresses(node, resolve)) for node in prepared.nodes]

    def move(self, built: Built, resolve: Resolve) -> None:
        """Change the addresses of what is given."""
        built[:] = [(node, *(_addresses(node, resolve) if node.given else old)) for node, *old in built]

    def release(self, built: Built) -> None:
        """Nothing is held."""

    def launch(self, built: Built, reads: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Replay; the copies that were asked for."""
        for node, inputs, outputs in built:
            arrays = [
                array if place.kind == "fixed" else from_bytes(mx.array(_at(address, array.nbytes)), array)
                for address, array, place in zip(inputs, node.launch.inputs, node.inputs, strict=True)
            ]
            made = run_on(self._target, node.kernel, replace(node.launch, inputs=tuple(arrays)))
            mx.eval(made)
            for address, array in zip(outputs, made, strict=True):
                if array.size:
                    _at(address, array.nbytes)[:] = _bytes(array)
        return [_at(address, nbytes).copy() for address, nbytes in reads]

    def read(self, begun: list[np.ndarray]) -> list[np.ndarray]:
        """The copies."""
        return begun

    def copy(self, pairs: Sequence[tuple[int, int, int]]) -> None:
        """Copy (to, from, bytes)."""
        for to, source, nbytes in pairs:
            _at(to, nbytes)[:] = _at(source, nbytes)

    def wait(self) -> None:
        """All is done."""


def _addresses(node: Node, resolve: Resolve) -> tuple[list[int], list[int]]:
    return [resolve(place) for place in node.inputs], [resolve(place) for place in node.outputs]


def _at(address: int, nbytes: int) -> np.ndarray:
    if not nbytes:
        return np.zeros(0, np.uint8)
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def _bytes(array: mx.array) -> np.ndarray:
    return np.array(as_bytes(array), copy=False)
