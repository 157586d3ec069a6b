"""Threads that share the tasks of a native loop: these let Python's lock go, and no result depends on who did what."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property


class Workers:
    """The calling thread and `threads - 1` others.

    Args:
        threads: by default the processors that this process may use.
    """

    def __init__(self, threads: int | None = None):
        if threads is not None and threads < 1:
            raise ValueError(f"at least one thread is needed, not {threads}")
        affinity = getattr(os, "sched_getaffinity", None)
        self.threads = threads or (len(affinity(0)) if affinity else os.cpu_count() or 1)

    def share(self, stage: Callable[[int, int], None], count: int, size: int = 1) -> None:
        """stage(begin, end) over `count` items, `size` of them a task."""
        self.run(lambda i: stage(i * size, min(count, (i + 1) * size)), -(-count // size))

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads - 1, thread_name_prefix="labkit-native")

    def run(self, task: Callable[[int], None], count: int) -> None:
        """task(0) to task(count - 1), each once, in any order; a free thread takes the next."""
        helpers = min(self.threads, count) - 1
        if helpers <= 0:
            for number in range(count):
                task(number)
            return
        numbers = itertools.count()

        def work() -> None:
            while (number := next(numbers)) < count:
                task(number)

        futures = [self._pool.submit(work) for _ in range(helpers)]
        try:
            work()
        finally:
            # A helper that has not begun finds nothing left to do; in a forked process it never will begin.
            for future in futures:
                if not future.cancel():
                    future.result()


@cache
def all_workers() -> Workers:
    """As many as the process may use, shared by all kernels."""
    return Workers()
