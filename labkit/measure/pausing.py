"""What a pause and its resume cost, against the bytes that they must move."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from labkit.caches.host import shares_memory
from labkit.engine import Engine, MemoryGuard, Policy
from labkit.engine.memory import FakeMeter
from labkit.engine.prefix import PrefixStore, blockfile
from labkit.engine.prefix.filesystem import FileSystem, pages
from labkit.measure.paired import median_interval
from labkit.measure.parking import request
from labkit.models import LoadedModel

HUGE = 1 << 50
FIELDS = ("out", "out processor", "in", "in processor", "check", "check processor")


@dataclass(frozen=True)
class PauseCost:
    """One row put away and brought back. Seconds are the medians of the rounds, bytes of its caches' valid part.

    The bytes alone are moved as a row must be, that is there after a power cut and never there in part: written beside
    their name, flushed, renamed, and the folder flushed. What no store can leave out that proves what it reads is not
    in them: a checksum looks at every byte once more each way. It is measured as well, so that what is left can be told
    from it. The bytes alone go the plain way, write after write and then the flush; a store that lets the disk begin
    while it still writes (`FileSystem.write`) may be faster.

    Attributes:
        tokens: in its caches.
        bytes: that must go each way.
        pause_seconds, resume_seconds: of the engine, from the boundary on.
        out_seconds, in_seconds: the same bytes and nothing else: on the disk under their name, their memory given
            back; read into new arrays. Without a copy in between where the host shares the arrays' memory, without
            checksums, and with one wait for the device each way; on the same disk, in turns with the engine's.
        check_seconds: the store's checksums of the bytes, once, in one thread.
        ratio: both of the engine over both of the bytes, median of the rounds.
        ratio_low, ratio_high: an interval for it from the order of the rounds alone (`paired.median_interval`).
        checked_ratio: as `ratio`, but over the bytes and their checksums each way.
        pause_processor, resume_processor, out_processor, in_processor, check_processor: the same in seconds of
            processor time of all threads, which a busy machine changes less.
        processor_ratio, checked_processor_ratio: as the ratios, of these.
    """

    tokens: int
    bytes: int
    pause_seconds: float
    resume_seconds: float
    out_seconds: float
    in_seconds: float
    check_seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    checked_ratio: float
    pause_processor: float
    resume_processor: float
    out_processor: float
    in_processor: float
    check_processor: float
    processor_ratio: float
    checked_processor_ratio: float

    def as_record(self) -> dict[str, Any]:
        """JSON data."""
        return asdict(self)


def pause_cost(loaded: LoadedModel, folder: Path, tokens: int, *, width: int, rounds: int = 5) -> PauseCost:
    """Pause and resume a row with `tokens` tokens in its caches, by turns with moving its bytes alone.

    The row's prompt is not stored beforehand: a pause writes all of it, as that of a long answer does.

    Args:
        folder: a new one, on the disk that is asked about.
        width: tokens of a chunk.
    """
    store = _Private(loaded, folder, width)
    meter = FakeMeter(HUGE, loaded.weights_bytes)
    guard = MemoryGuard(HUGE, meter=meter, interval=0)
    engine = Engine(loaded, guard=guard, policy=Policy(patience=0), prefixes=store)
    hands = _Timed(engine._parking._hands)
    engine.submit(request(loaded, "row", tokens, 4 * rounds + 8))
    try:
        _until(engine, "token")
        ours, floor, sizes = [], [], []
        for _ in range(rounds):
            meter.live = int(0.97 * HUGE)
            _until(engine, "paused")
            meter.live = loaded.weights_bytes
            _until(engine, "token")
            store.flush()  # what the resume left to be removed is not the yardstick's to wait for
            ours.append((*hands.took["pause"], *hands.took["resume"], 0.0, 0.0))
            moved = _moved(engine._executor.lanes.batches()[0].caches, folder / "floor")
            sizes.append(moved[0])
            floor.append(moved[1:])
        ratios, by_processor, checked, checked_by_processor = (
            sorted(
                (a[k] + a[k + 2]) / (b[k] + b[k + 2] + 2 * checks * b[k + 4]) for a, b in zip(ours, floor, strict=True)
            )
            for checks in (0, 1)
            for k in (0, 1)
        )
        low, high, _ = median_interval(ratios, 0.95)
        engines, bytes_alone = (
            dict(zip(FIELDS, np.median(side, axis=0).tolist(), strict=True)) for side in (ours, floor)
        )
        return PauseCost(
            tokens=tokens,
            bytes=int(np.median(sizes)),
            pause_seconds=engines["out"],
            resume_seconds=engines["in"],
            out_seconds=bytes_alone["out"],
            in_seconds=bytes_alone["in"],
            check_seconds=bytes_alone["check"],
            ratio=float(np.median(ratios)),
            ratio_low=low,
            ratio_high=high,
            checked_ratio=float(np.median(checked)),
            pause_processor=engines["out processor"],
            resume_processor=engines["in processor"],
            out_processor=bytes_alone["out processor"],
            in_processor=bytes_alone["in processor"],
            check_processor=bytes_alone["check processor"],
            processor_ratio=float(np.median(by_processor)),
            checked_processor_ratio=float(np.median(checked_by_processor)),
        )
    finally:
        engine.close()
        store.close()


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and seconds of processor time of all threads, that `call` takes."""
    begin, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - begin, time.process_time() - processor


class _Timed:
    """Times an engine's hands. What the device still does of the step before is not theirs."""

    def __init__(self, hands: Any):
        self.took: dict[str, tuple[float, float]] = {}
        for name in ("pause", "resume"):
            setattr(hands, name, self._watched(name, getattr(hands, name)))

    def _watched(self, name: str, call: Callable[[str], Any]) -> Callable[[str], Any]:
        def watched(id: str) -> Any:
            result = []
            mx.synchronize()
            self.took[name] = timed(lambda: result.append(call(id)))
            return result[0]

        return watched


class _Private(PrefixStore):
    """A store that keeps paused rows and no prefixes."""

    def __init__(self, loaded: LoadedModel, folder: Path, width: int):
        super().__init__(loaded, folder / "store", width=width, keep_free_bytes=0, queue_bytes=64 << 30)

    def commit(self, tokens: Sequence[int], caches: Sequence[Any], **options: Any) -> None:
        return None


def _until(engine: Engine, kind: str) -> None:
    while not any(event.kind == kind for event in engine.step()):
        pass


def _moved(caches: Sequence[Any], path: Path) -> tuple[int, float, float, float, float, float, float]:
    """Bytes of caches, and what it takes (`timed`) to move them and nothing else: out, then in; and to check them."""
    # Copies of their own, which the row's caches do not share.
    arrays = [array + mx.zeros_like(array) for cache in caches for array in cache._pack()[0].values()]
    mx.eval(arrays)
    like = [(array.shape, array.dtype) for array in arrays]
    size, back = sum(array.nbytes for array in arrays), []
    out = timed(lambda: _out(arrays, path))
    into = timed(lambda: back.extend(_in(like, path)))
    path.unlink()
    pieces = _bytes(back)
    return size, *out, *into, *timed(lambda: blockfile.checksums(pieces))


def _out(arrays: list[mx.array], path: Path) -> None:
    """Arrays to a file that is on the disk, as is its name, whole or not at all; written from where they lie, if the
    host reads it. Then their memory is given back, for which they went."""
    system, at, beside = FileSystem(), 0, path.with_suffix(".half")
    descriptor = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        for data in _bytes(arrays):
            while len(data):
                written = os.pwrite(descriptor, data, at)
                data, at = data[written:], at + written
        system.sync(descriptor)
    finally:
        os.close(descriptor)
    system.replace(beside, path)
    system.sync_folder(path.parent)
    arrays.clear()


def _in(like: Sequence[tuple[tuple[int, ...], mx.Dtype]], path: Path) -> list[mx.array]:
    """What `_out` wrote, as arrays of these shapes; read to where they are to lie, if the host writes it."""
    back = [mx.zeros(shape, dtype) for shape, dtype in like]
    rooms, at = _bytes(back) if shares_memory() else [pages(array.nbytes) for array in back], 0
    with FileSystem().reading(path) as (_, fill):
        for room in rooms:
            fill([room], at)
            at += len(room)
    if not shares_memory():
        read = [mx.array(np.frombuffer(room, np.uint8)) for room in rooms]
        back = [new.view(dtype).reshape(shape) for new, (shape, dtype) in zip(read, like, strict=True)]
        mx.eval(back)
    return back


def _bytes(arrays: Sequence[mx.array]) -> list[memoryview]:
    """Arrays' bytes: their own memory, if the host may touch it. As whole numbers, since numpy has no bfloat16."""
    number = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
    views = [array.view(number[array.dtype.size]) for array in arrays]
    mx.eval(views)
    return [memoryview(np.array(view, copy=not shares_memory())).cast("B") for view in views]
