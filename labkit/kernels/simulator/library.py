"""A built kernel in this process: ctypes mirror of cpp/runtime/interface.h, buffers between guard pages, launches."""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from collections.abc import Iterator, Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAX_FAULTS, MAX_BUFFERS = 64, 128
LANES_SHARED = 1024
INPUT, OUTPUT, INITIALISED_OUTPUT = range(3)
GUARD_BYTES = (16 << 30, 1 << 20)  # tried in turn: the second is for systems that limit address space


class _Storage(Structure):
    _fields_ = [
        ("name", c_char_p),
        *((name, c_void_p) for name in ["begin", "end", "section_begin", "section_end"]),
        ("line", c_int32),
    ]


class _Buffer(Structure):
    _fields_ = [("data", c_void_p), ("bytes", c_uint64), ("itemsize", c_uint32), ("kind", c_uint32)]


class FaultRecord(Structure):
    _fields_ = [
        *(
            (name, c_uint32)
            for name in ["kind", "thread", "threadgroup", "other_thread", "other_threadgroup", "size", "mask", "signal"]
        ),
        *((name, c_int32) for name in ["buffer", "storage", "line", "other_line"]),
        ("byte", c_int64),
        *((name, c_uint64) for name in ["pc", "other_pc", "count", "address"]),
    ]


class SiteRecord(Structure):
    _fields_ = [
        *((name, c_uint64) for name in ["pc", "bytes", "requests", "lines", "sectors"]),
        ("buffer", c_int32),
        ("storage", c_int32),
        ("write", c_uint32),
        ("accesses", c_uint32),
    ]


class BufferRecord(Structure):
    _fields_ = [
        *((name, c_uint64 * 2) for name in ["bytes", "requests", "lines", "sectors", "footprint_lines"]),
        ("unwritten_bytes", c_uint64),
        ("first_unwritten", c_uint64),
    ]


class CounterRecord(Structure):
    _fields_ = [
        (name, c_uint64)
        for name in [
            "threadgroups",
            "threads",
            "barriers",
            "simd_barriers",
            "simd_operations",
            "atomics",
            "switches",
            "threadgroup_bytes",
            "threadgroup_read",
            "threadgroup_written",
        ]
    ]


class _Request(Structure):
    _fields_ = [
        ("arguments", POINTER(c_void_p)),
        ("buffers", POINTER(_Buffer)),
        ("buffer_count", c_uint32),
        ("grid", c_uint32 * 3),
        ("threadgroup", c_uint32 * 3),
        *((name, c_uint32) for name in ["check", "resident", "order", "seed"]),
        ("workspace", c_void_p),
        ("workspace_bytes", c_uint64),
    ]


class ResultRecord(Structure):
    _fields_ = [
        ("counters", CounterRecord),
        ("buffers", BufferRecord * MAX_BUFFERS),
        ("faults", FaultRecord * MAX_FAULTS),
        ("fault_count", c_int32),
        ("storage_count", c_int32),
    ]


@dataclass(frozen=True)
class BufferSpec:
    """A buffer to lend to a launch: its first content (or its size), and who may write it."""

    content: np.ndarray | int  # bytes to copy in, or how many
    itemsize: int
    kind: int
    lies_in: int | None = None  # the number of the buffer whose memory it is


@dataclass(frozen=True)
class StorageArray:
    """A threadgroup array of the kernel."""

    name: str
    bytes: int
    line: int


# A launch holds the signal handlers of the whole process, so one runs at a time, and all share one workspace.
_one_launch = threading.Lock()
_workspace: tuple[int, int] | None = None


def _lanes_at_once(grid: Sequence[int], threadgroup: Sequence[int], resident: bool) -> int:
    group = math.prod(min(t, g) for t, g in zip(threadgroup, grid, strict=True))
    groups = math.prod(-(-g // min(t, g)) for t, g in zip(threadgroup, grid, strict=True))
    return group * groups if resident else group


class Library:
    """One built kernel. Keep it: its code stays loaded."""

    def __init__(self, path: Path):
        self.path = path
        self._dll = ctypes.CDLL(str(path))
        self._dll.lk_map.restype = c_void_p
        self._dll.lk_map.argtypes = [c_uint64, c_uint64]
        self._dll.lk_unmap.argtypes = [c_void_p, c_uint64, c_uint64]
        self._dll.lk_make_read_only.argtypes = [c_void_p, c_uint64]
        self._dll.lk_launch.argtypes = [POINTER(_Request), POINTER(ResultRecord)]
        self._dll.lk_sites.argtypes = [POINTER(SiteRecord), c_uint64]
        self._dll.lk_sites.restype = c_uint64
        self._dll.lk_workspace_bytes.restype = c_uint64
        self._dll.lk_workspace_bytes.argtypes = [c_uint64, c_uint64]
        self._dll.lk_reserve_workspace.restype = c_void_p
        self._dll.lk_reserve_workspace.argtypes = [c_uint64, c_uint64]
        self._dll.lk_release_workspace.argtypes = [c_void_p, c_uint64]
        self._dll.lk_image.restype = c_uint64
        self._dll.lk_storage_table.restype = POINTER(_Storage)
        self.image = int(self._dll.lk_image())
        count = self._dll.lk_storage_size()
        table = self._dll.lk_storage_table()
        self.storage = [
            StorageArray(table[i].name.decode(), table[i].end - table[i].begin, table[i].line) for i in range(count)
        ]

    def launch(
        self,
        specs: Sequence[BufferSpec],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        *,
        check: bool,
        order: int,
        seed: int,
        resident: bool,
        time_limit: float | None,
    ) -> tuple[ResultRecord, list[np.ndarray], list[SiteRecord]]:
        """Run the kernel once.

        Returns:
            what was counted and found, the bytes of each output, and the loads and stores seen (check builds only).
        """
        if len(specs) > MAX_BUFFERS:
            raise ValueError(f"a kernel takes at most {MAX_BUFFERS} buffers, not {len(specs)}")
        mapped: list[tuple[int, int, int]] = []
        try:
            buffers = (_Buffer * max(len(specs), 1))()
            for index, spec in enumerate(specs):
                if spec.lies_in is not None:
                    continue
                size = spec.content if isinstance(spec.content, int) else spec.content.nbytes
                data, guard = self._map(size)
                mapped.append((data, size, guard))
                if not isinstance(spec.content, int):
                    ctypes.memmove(data, spec.content.ctypes.data, size)
                elif spec.kind == OUTPUT:
                    ctypes.memset(data, 0xFF, size)  # NaN: what the kernel leaves unwritten shows
                if spec.kind == INPUT:
                    self._dll.lk_make_read_only(data, size)
                buffers[index] = _Buffer(data, size, max(spec.itemsize, 1), spec.kind)
            for index, spec in enumerate(specs):
                if spec.lies_in is not None:  # no bytes of its own: each access is one to the other buffer
                    buffers[index] = _Buffer(buffers[spec.lies_in].data, 0, spec.itemsize, spec.kind)
            arguments = (c_void_p * max(len(specs), 1))(*(b.data for b in buffers))
            request = _Request(
                arguments,
                buffers,
                len(specs),
                (c_uint32 * 3)(*grid),
                (c_uint32 * 3)(*threadgroup),
                int(check),
                int(resident),
                order,
                seed,
            )
            result = ResultRecord()
            lanes = _lanes_at_once(grid, threadgroup, resident)
            with _one_launch, self._workspace(lanes) as (request.workspace, request.workspace_bytes):
                self._run(request, result, time_limit)
                sites = (SiteRecord * self._dll.lk_sites(None, 0))()
                self._dll.lk_sites(sites, len(sites))
            outputs = [
                np.frombuffer(ctypes.string_at(buffer.data, buffer.bytes), np.uint8)
                for buffer, spec in zip(buffers, specs, strict=False)
                if spec.kind != INPUT
            ]
            return result, outputs, list(sites)
        finally:
            for data, size, guard in mapped:
                self._dll.lk_unmap(data, size, guard)

    @contextlib.contextmanager
    def _workspace(self, lanes: int) -> Iterator[tuple[int, int]]:
        """Stacks for the launch: the shared ones, or for a resident grid its own, given back afterwards."""
        global _workspace
        if lanes <= LANES_SHARED:
            _workspace = _workspace or self._reserve(LANES_SHARED)
            yield _workspace
            return
        own = self._reserve(lanes)
        try:
            yield own
        finally:
            self._dll.lk_release_workspace(*own)

    def _reserve(self, lanes: int) -> tuple[int, int]:
        size = self._dll.lk_workspace_bytes(lanes, lanes)  # a simdgroup has at least one lane
        memory = self._dll.lk_reserve_workspace(lanes, size)
        if not memory:
            raise MemoryError(f"no address space for the stacks of {lanes} simulated threads ({size} bytes)")
        return memory, size

    def _map(self, size: int) -> tuple[int, int]:
        for guard in GUARD_BYTES:
            if data := self._dll.lk_map(size, guard):
                return data, guard
        raise MemoryError(f"no memory for a kernel's buffer of {size} bytes")

    def _run(self, request: _Request, result: ResultRecord, time_limit: float | None) -> None:
        # In a thread of its own, so that Ctrl-C and the time limit can end a kernel that never does.
        worker = threading.Thread(target=self._dll.lk_launch, args=(byref(request), byref(result)), daemon=True)
        worker.start()
        try:
            worker.join(time_limit)
        except BaseException:
            self._stop(worker)
            raise
        if worker.is_alive():
            self._stop(worker)

    def _stop(self, worker: threading.Thread) -> None:
        while worker.is_alive():
            self._dll.lk_stop()
            worker.join(0.05)
