"""What a step costs the host when the model costs nothing: scheduling, bookkeeping, sampling, text and events."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from labkit.engine import Engine, batch, lanes
from labkit.models import LoadedModel, Output


@dataclass(frozen=True)
class HostCost:
    """Seconds of one decode step, with a model that answers at once; replayed rows take the model's own step meanwhile,
    since what is replayed is no call of a model.

    Attributes:
        rows: B.
        step: the whole of `Engine.step`: median.
        model: of that, building the forward's answer and waiting for the device.
    """

    rows: int
    step: float
    model: float

    @property
    def engine(self) -> float:
        """What the engine itself takes."""
        return self.step - self.model


class _Instant:
    """A model whose logits are there already, but for steps that are recorded."""

    def __init__(self, model: Any, rows: int):
        self._model = model
        self._logits = mx.random.normal((rows, 1, 512), key=mx.random.key(0))
        self.seconds: list[float] = []
        mx.eval(self._logits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, caches: list, rows: Any, **_: Any) -> Output:
        return Output(self._logits[: tokens.shape[0]], None)


def host_cost(loaded: LoadedModel, rows: int, *, steps: int = 200, **sampling: Any) -> HostCost:
    """Measure it for `rows` rows that decode together.

    The choice of a token is computed on the device, in a few microseconds for so small a vocabulary: that, and the
    wait for it, count as the model's.
    """
    engine = Engine(replace(loaded, model=_Instant(loaded.model, rows)), capacity_bytes=1 << 50)
    for row in range(rows):
        engine.submit(engine.request([1 + row], max_tokens=steps + 8, ignore_eos=True, **sampling))
    for _ in range(4):
        engine.step()
    whole, model = [], []
    for _ in range(steps):
        device = _Clock()
        with device:
            begin = time.perf_counter()
            engine.step()
            whole.append(time.perf_counter() - begin)
        model.append(device.seconds)
    engine.close()
    return HostCost(rows, statistics.median(whole), statistics.median(model))


class _Clock:
    """Time spent in the choice of tokens, in handing work to the device, and in waiting for it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> _Clock:
        self._saved = batch.choose, mx.async_eval, lanes.read
        batch.choose, mx.async_eval, lanes.read = (self._timed(call) for call in self._saved)
        return self

    def __exit__(self, *_: object) -> None:
        batch.choose, mx.async_eval, lanes.read = self._saved

    def _timed(self, call: Any) -> Any:
        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed
