"""labkit's engine and mlx-lm's `BatchGenerator`, told the same requests and timed at the same places."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from labkit.caches import Cache
from labkit.engine import Engine
from labkit.measure.batching.workload import Workload
from labkit.measure.end_to_end.filled import Filled
from labkit.models import LoadedModel


class Read(NamedTuple):
    """A token that was read: seconds since the start, its row, processor seconds of this process until then."""

    when: float
    row: int
    processor: float = 0.0


@dataclass(frozen=True)
class Run:
    """What one side took for one workload.

    Attributes:
        throughput: tokens a second of all rows together, from when every row has a quarter of its tokens, and three at
            least, until the first one ends.
        gap_median, gap_p95, gap_worst: seconds between two tokens of a row in that time.
        first_mean, first_last: seconds until rows had their first token: on average, and the last row.
        seconds: until every row had finished.
        processor: seconds of this process's threads a token, in the time of `throughput`: what a busy machine changes
            least.
        peak_bytes: memory above what was in use before, at most.
    """

    throughput: float
    gap_median: float
    gap_p95: float
    gap_worst: float
    first_mean: float
    first_last: float
    seconds: float
    processor: float
    peak_bytes: int

    @classmethod
    def of(cls, reads: Sequence[Read], rows: int, peak_bytes: int) -> Run:
        """From the times at which tokens were read."""
        times: list[list[float]] = [[] for _ in range(rows)]
        for read in reads:
            times[read.row].append(read.when)
        # Steps that compile kernels, merge caches or are recorded belong to the start: the first quarter.
        begin = max(row[min(max(2, len(row) // 4), len(row) - 1)] for row in times)
        end = min(row[-1] for row in times)
        steady = [read for read in reads if begin < read.when <= end]
        used = [read.processor for read in reads if begin <= read.when <= end]
        gaps = [b - a for row in times for a, b in pairwise(row) if begin <= a and b <= end]
        gaps = sorted(gaps) or [0.0]
        return cls(
            throughput=len(steady) / (end - begin) if end > begin else 0.0,
            gap_median=statistics.median(gaps),
            gap_p95=gaps[int(0.95 * (len(gaps) - 1))],
            gap_worst=gaps[-1],
            first_mean=statistics.mean(row[0] for row in times),
            first_last=max(row[0] for row in times),
            seconds=max(read.when for read in reads),
            processor=(used[-1] - used[0]) / len(steady) if steady else 0.0,
            peak_bytes=peak_bytes,
        )


class Side(Protocol):
    """An engine that is told requests."""

    name: str

    def run(self, workload: Workload) -> Run:
        """All requests at once, until every one has its tokens."""
        ...


class Contexts:
    """Random states of every context, made once for both sides."""

    def __init__(self, layouts: Sequence[Any]):
        self._layouts, self._known = layouts, {}

    def __getitem__(self, tokens: int) -> Filled:
        if tokens not in self._known:
            self._known[tokens] = Filled(self._layouts, tokens)
        return self._known[tokens]


class EngineSide:
    """labkit's engine. Contexts that are there at the start come from a store of prefixes, like any others.

    Args:
        options: of `Engine`, such as kv="paged".

    Attributes:
        recorded: of the last run: recordings of decode steps, their seconds and bytes, and what was refused.
    """

    def __init__(self, loaded: LoadedModel, contexts: Contexts, name: str = "labkit", **options: Any):
        self.loaded, self.name, self._contexts = loaded, name, contexts
        self._options = {"capacity_bytes": 1 << 50, **options}
        self.recorded: dict[str, Any] = {}

    def run(self, workload: Workload) -> Run:
        model = self.loaded.model
        store = _Store(workload, self._contexts, model.make_caches) if workload.prefilled else None
        before = _quiet()
        with Engine(self.loaded, prefixes=store, max_rows=workload.rows, **self._options) as engine:
            options = {"max_tokens": workload.answer, "ignore_eos": True, **workload.sampling}
            requests = [engine.request(prompt, **options) for prompt in workload.prompts(model.vocab_size)]
            row = {request.id: number for number, request in enumerate(requests)}
            clock, reads = _Clock(), []
            for request in requests:
                engine.submit(request)
            while not engine.idle:
                events = engine.step()
                reads += clock.read(row[event.request] for event in events if event.kind == "token")
            replays = engine.replays
            self.recorded = {"recorded": replays.recorded, "seconds": replays.seconds, "bytes": replays.nbytes}
            self.recorded["refused"] = list(replays.refused.values())
        return Run.of(reads, workload.rows, mx.get_peak_memory() - before)


class BatchGeneratorSide:
    """mlx-lm's `BatchGenerator` on mlx-lm's module and caches.

    Args:
        vocabulary: tokens that there are.
        context: entered around everything that is computed (the fair line's kernels).
    """

    def __init__(
        self,
        module: Any,
        contexts: Contexts,
        name: str,
        *,
        vocabulary: int,
        context: Callable[[], Any] = contextlib.nullcontext,
    ):
        module.eval()  # a module starts in training mode, in which mlx-lm leaves its kernels off
        self.module, self.name, self.vocabulary = module, name, vocabulary
        self._contexts, self._context = contexts, context

    def run(self, workload: Workload) -> Run:
        from mlx_lm.generate import BatchGenerator
        from mlx_lm.models.cache import make_prompt_cache
        from mlx_lm.sample_utils import make_sampler

        with self._context():
            prompts, caches = workload.prompts(self.vocabulary), None
            before = _quiet()
            options = {"max_tokens": workload.answer, "completion_batch_size": max(32, workload.rows)}
            if workload.temperature:
                options["sampler"] = make_sampler(workload.temperature, top_p=workload.top_p)
            generator = BatchGenerator(self.module, **options)
            clock, reads = _Clock(), []
            if workload.prefilled:
                stream = generator.stream
                with mx.stream(stream):
                    caches = [
                        self._contexts[context].into_mlx_lm(make_prompt_cache(self.module))
                        for context in workload.contexts
                    ]
                prompts = [prompt[-1:] for prompt in prompts]
            ids = generator.insert([list(prompt) for prompt in prompts], caches=caches)
            row = {id: number for number, id in enumerate(ids)}
            left = workload.rows * workload.answer
            while left:
                responses = generator.next_generated()
                reads += clock.read(row[response.uid] for response in responses)
                left -= len(responses)
            peak = mx.get_peak_memory() - before
            generator.close()
        return Run.of(reads, workload.rows, peak)


class _Clock:
    """Since it was made."""

    def __init__(self) -> None:
        self._begin = time.perf_counter(), time.process_time()

    def read(self, rows: Iterable[int]) -> list[Read]:
        """Tokens of these rows, read now."""
        now, used = time.perf_counter() - self._begin[0], time.process_time() - self._begin[1]
        return [Read(now, row, used) for row in rows]


class _Store:
    """A store that knows every context of a workload, and nothing else."""

    def __init__(self, workload: Workload, contexts: Contexts, make: Callable[[], list[Cache]]):
        self.grid = max(workload.contexts)
        self._contexts, self._make = contexts, make

    def lookup(self, tokens: Sequence[int], *_: Any, **__: Any) -> Any:
        return _Lease(len(tokens), lambda: self._contexts[len(tokens)].into(self._make()))

    def commit(self, *_: Any, **__: Any) -> None:
        """Nothing is kept."""

    def private_ids(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class _Lease:
    tokens: int
    restore: Callable[[], list[Cache]]

    def release(self) -> None:
        """Nothing was held."""


def _quiet() -> int:
    """Everything computed, the allocator's pool given back: bytes in use, from which a peak is counted."""
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    return mx.get_active_memory()
