"""Calls that run beside the caller's: reads, writes, flushes and checksums, which let Python's lock go."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

THREADS = min(8, os.cpu_count() or 1)

Begin = Callable[[Callable[[Any], Any], Any], Callable[[], Any]]
"""Begins a call with one argument; gives what returns its result, or raises what it raised."""


@contextlib.contextmanager
def beside(worthwhile: bool = True) -> Iterator[Begin]:
    """What begins calls in other threads; or makes them at once, where that is not worth a thread's while, or the
    interpreter ends and starts none any more. However the block ends, nothing that was begun in it still runs."""
    begun: list[Future] = []

    def at_once(call: Callable[[Any], Any], argument: Any) -> Callable[[], Any]:
        result = call(argument)
        return lambda: result

    def elsewhere(call: Callable[[Any], Any], argument: Any) -> Callable[[], Any]:
        try:
            future = _pool().submit(call, argument)
        except RuntimeError:
            return at_once(call, argument)
        begun.append(future)
        return future.result

    try:
        yield elsewhere if worthwhile else at_once
    finally:
        wait(begun)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Kept: to start threads takes as long as the checksums of 4 MB."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="labkit-store")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads stay behind
