"""Attention through a block table beside one buffer a row, and beside gathering first: bf16, 16/2 heads of 256."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from labkit.kernels.attention import Tail, decode_rows
from labkit.kernels.attention.reference import attention
from labkit.kernels.device_clock import DeviceTime, device_times, with_device_time
from labkit.kernels.queued import copies_for
from labkit.kernels.targets import device_target

HEADS, KV_HEADS, WIDTH, ROOM = 16, 2, 256, 256
SCALE = WIDTH**-0.5
COPY_RATE = 4.3e12  # bytes a second, an H200's device-to-device copy

# Lengths of the rows, and the time predicted before any run: bytes at 2.9 TB/s (what 128K columns reached in one
# buffer), 18 us for two launches and the merge. Gathering reads and writes all bytes once more, at 4.3 TB/s and two
# launches.
PROBLEMS = (
    ("1 row of 16K", (16384,), 30),
    ("4 rows of 16K", (16384,) * 4, 64),
    ("8 rows: one of 16K, seven of 512", (16384, *(512,) * 7), 33),
    ("8 rows of 4K", (4096,) * 8, 41),
    ("32 rows of 4K", (4096,) * 32, 111),
    ("1 row of 128K", (131072,), 111),
)
PAGES = (16, 8, 32, 64, 256)
LAUNCHES, ROUNDS = 48, 7
DEFAULT = f"pages of {PAGES[0]}"
ONE_BUFFER = "one buffer a row"
GATHERING = ("gather, then our kernel", "gather, then MLX's")

Way = Callable[[tuple[mx.array, ...]], mx.array]
"""Attention over a set of tensors, [B, Hq, D]: the next call's queries."""


@dataclass
class Problem:
    """Rows of several lengths in a pool, their blocks in random order; and the same in one buffer."""

    lengths: Sequence[int]
    page: int

    def __post_init__(self) -> None:
        rows, longest = len(self.lengths), max(self.lengths)
        self.finished = [(n - 1) // self.page * self.page for n in self.lengths]
        self.blocks = [n // self.page for n in self.finished]
        width = -(-max(self.blocks) // 32) * 32
        self.count = 1 + sum(self.blocks)
        order = (1 + mx.random.permutation(self.count - 1)).tolist()
        table = [[order.pop() for _ in range(n)] + [0] * (width - n) for n in self.blocks]
        self.table = mx.array(table, dtype=mx.int32)
        self.settled = mx.array(self.finished, dtype=mx.int32)
        self.first = mx.array([0] * max(rows, 8), dtype=mx.int32)[:rows]
        self.last = mx.array(list(self.lengths), dtype=mx.int32)
        self.columns = -(-longest // 256) * 256

    @property
    def nbytes(self) -> int:
        """Keys and values that must be read."""
        return 2 * 2 * KV_HEADS * WIDTH * sum(self.lengths)

    def tensors(self, *, pooled: bool) -> tuple[mx.array, ...]:
        """Queries, keys, values, and the tails."""
        rows = len(self.lengths)
        shape = (self.count, KV_HEADS, self.page, WIDTH) if pooled else (rows, KV_HEADS, self.columns, WIDTH)
        shapes = [(rows, HEADS, WIDTH), shape, shape, *[(rows, KV_HEADS, ROOM, WIDTH)] * 2]
        made = tuple(mx.random.normal(one, dtype=mx.bfloat16) for one in shapes)
        mx.eval(made)
        return made

    def paged(self, one: tuple[mx.array, ...], **options) -> mx.array:
        """By the kernel, through the table."""
        tail = Tail(*one[3:], self.settled)
        return decode_rows(*one[:3], self.first, self.last, scale=SCALE, tail=tail, table=self.table, **options)

    def plain(self, one: tuple[mx.array, ...], **options) -> mx.array:
        """By the kernel, on one buffer a row."""
        return decode_rows(*one[:3], self.first, self.last, scale=SCALE, **options)

    def gathered(self, one: tuple[mx.array, ...]) -> tuple[mx.array, mx.array]:
        """The rows' blocks put together, [B, Hkv, N * page, D]."""
        return tuple(
            pool[self.table].swapaxes(1, 2).reshape(len(self.lengths), KV_HEADS, -1, WIDTH) for pool in one[1:3]
        )

    def gather_then_kernel(self, one: tuple[mx.array, ...], **options) -> mx.array:
        """Gather, then our kernel."""
        tail = Tail(*one[3:], self.settled)
        if len(set(self.finished)) > 1:  # one buffer has one number of settled columns
            tail = None
        return decode_rows(one[0], *self.gathered(one), self.first, self.last, scale=SCALE, tail=tail, **options)

    def gather_then_mlx(self, one: tuple[mx.array, ...]) -> mx.array:
        """Gather, then MLX's attention under a mask, the tail left out."""
        keys, values = self.gathered(one)
        mask = (mx.arange(keys.shape[2]) < self.settled[:, None])[:, None, None]
        out = mx.fast.scaled_dot_product_attention(mx.expand_dims(one[0], 2), keys, values, scale=SCALE, mask=mask)
        return out.squeeze(2)

    def error(self, one: tuple[mx.array, ...], **options) -> float:
        """The kernel against the reference, relative."""
        keys, values = self.gathered(one)
        whole = [mx.concatenate([x, tail], axis=2) for x, tail in zip((keys, values), one[3:], strict=True)]
        at = mx.arange(whole[0].shape[2])
        index = mx.where(at < self.settled[:, None], at, keys.shape[2] + at - self.settled[:, None])
        index = mx.minimum(index, whole[0].shape[2] - 1)[:, None, :, None]
        whole = [mx.take_along_axis(x, index, axis=2) for x in whole]
        got = self.paged(one, **options).astype(mx.float32)
        with mx.stream(mx.cpu):  # the reference alone: inside, no kernel finds its GPU
            want = attention(one[0], *whole, self.first, self.last, SCALE)
            return (mx.linalg.norm((got - want).flatten()) / mx.linalg.norm(want.flatten())).item()


def rows(quick: bool = True, *, deadline: float = float("inf")) -> Iterator[dict]:
    """One row a problem and way, the default's, pages of 16, first.

    `us` is of calls in one evaluation, each of which waits for the one before it as a decode step's layers do (of
    gathering, its attention does); the host's cost of a launch is inside where it is the larger. `device_us`, where it
    can be had, is of a call alone, and TB/s is then its. `times_of_paged`, `least`, `most` and
    `device_times_of_paged` are a way's time over that of pages of 16, the first three round by round. The default's own
    row has the answers: its time over one buffer's (`times_of_one_buffer`), and the faster way to gather first over it
    (`gathering_times`), by both clocks.

    Args:
        quick: the first four problems.
        deadline: no problem begins after this, on `time.perf_counter`.
    """
    for label, lengths, predicted in PROBLEMS[: 4 if quick else None]:
        if time.perf_counter() > deadline:
            return
        try:
            yield from _problem(label, lengths, predicted)
        except Exception as failure:
            print(f"paged attention, {label}: {type(failure).__name__}: {str(failure)[:300]}")


def _problem(label: str, lengths: Sequence[int], predicted: float) -> Iterator[dict]:
    problems = {page: Problem(lengths, page) for page in PAGES}
    default = problems[PAGES[0]]
    copies = min(copies_for(default.nbytes), 4)
    plain = [default.tensors(pooled=False) for _ in range(copies)]
    pooled = {page: [problem.tensors(pooled=True) for _ in range(copies)] for page, problem in problems.items()}
    through = {f"pages of {page}": (problem, page, {}) for page, problem in problems.items()}
    through |= {
        f"{DEFAULT}, lanes": (default, PAGES[0], {"form": "lanes"}),
        f"{DEFAULT}, uneven cut": (default, PAGES[0], {"layout": "uneven"}),
    }
    ways: dict[str, tuple[Way, list]] = {
        DEFAULT: (default.paged, pooled[PAGES[0]]),
        ONE_BUFFER: (default.plain, plain),
        GATHERING[0]: (default.gather_then_kernel, pooled[PAGES[0]]),
        GATHERING[1]: (default.gather_then_mlx, pooled[PAGES[0]]),
        "one buffer, lanes": (partial(default.plain, form="lanes"), plain),
    }
    ways |= {name: (partial(one.paged, **options), pooled[page]) for name, (one, page, options) in through.items()}
    times = _alternating(ways)
    if DEFAULT not in times:
        return
    alone = device_times({name: [partial(ways[name][0], one) for one in ways[name][1]] for name in times})
    for name, measured in times.items():
        us = statistics.median(measured) * 1e6
        row = {"name": name, "shape": f"16/2 heads of 256, {label}", "us": us, "TB/s": default.nbytes / us / 1e6}
        row |= dict(zip(("times_of_paged", "least", "most"), _times(measured, times[DEFAULT]), strict=True))
        if name in alone and DEFAULT in alone:
            row["device_times_of_paged"] = alone[name].us / alone[DEFAULT].us
        if name == DEFAULT:
            row |= _answers(times, alone)
        row |= {"floor_us": default.nbytes / COPY_RATE * 1e6, "predicted_us": predicted, "target": device_target()}
        if name in through and max(lengths) < 50000:
            problem, page, options = through[name]
            row["relative_error"] = problem.error(pooled[page][0], **options)
        yield with_device_time(row, alone.get(name))


def _times(over: Sequence[float], under: Sequence[float]) -> tuple[float, float, float]:
    """The median, least and most of the ratios, round by round."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def _answers(times: Mapping[str, Sequence[float]], alone: Mapping[str, DeviceTime]) -> dict[str, list[float] | float]:
    """Pages over one buffer, and gathering over pages: [median, least, most] round by round, and on the device."""
    found: dict[str, list[float] | float] = {}
    if ONE_BUFFER in times:
        found["times_of_one_buffer"] = [*_times(times[DEFAULT], times[ONE_BUFFER])]
    if gathering := [_times(times[name], times[DEFAULT]) for name in GATHERING if name in times]:
        found["gathering_times"] = [*min(gathering)]
    if {DEFAULT, ONE_BUFFER, *GATHERING} <= alone.keys():
        found["device_times_of_one_buffer"] = alone[DEFAULT].us / alone[ONE_BUFFER].us
        found["device_gathering_times"] = min(alone[name].us for name in GATHERING) / alone[DEFAULT].us
    return found


def _alternating(ways: Mapping[str, tuple[Way, list]]) -> dict[str, list[float]]:
    """Seconds a call of each way, by turns, in rounds of chained calls over its sets of tensors; what fails is left
    out."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(ROUNDS + 1):
        for name in list(times):
            way, sets = ways[name]
            try:
                out = sets[0][0]
                for i in range(LAUNCHES):  # the output is the next call's queries
                    out = way((out, *sets[i % len(sets)][1:]))
                begin = time.perf_counter()
                mx.eval(out)
                mx.synchronize()
            except Exception as failure:
                print(f"{name}: {type(failure).__name__}: {str(failure)[:300]}")
                del times[name]
                continue
            if round_:
                times[name].append((time.perf_counter() - begin) / LAUNCHES)
    return times
