"""The engines of a comparison behind one face: each reads prompts and decodes by its own fastest direct loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import mlx.core as mx

from labkit import devices
from labkit.engine.replay import Replays
from labkit.kernels.recording import machine_here
from labkit.measure.direct import DirectRow
from labkit.measure.end_to_end.fair_line import own_deltanet
from labkit.measure.end_to_end.filled import Filled
from labkit.models.contract import Model
from labkit.models.rows import Rows

RELEASED, FAIR = "mlx-lm as released", "mlx-lm, own kernels"
CHUNK = 2048  # tokens of a prompt a forward, mlx-lm's default and ours where the model has no rule of its own


class Side(Protocol):
    """One engine with a model.

    Attributes:
        name: in tables.
        warm_up_tokens: a prompt of no more tokens than this warms it up; None: as many as the plan says.
    """

    name: str
    warm_up_tokens: int | None

    def prefill(self, tokens: mx.array) -> float:
        """Read a prompt, int32 [L], greedily; seconds until the first token is on the host."""
        ...

    def decode(self, filled: Filled, steps: int, warm_up: int) -> tuple[float, int]:
        """Decode greedily from filled caches: (seconds a token, bytes of the caches before the first step).

        The device runs ahead of the host as far as the engine lets it. `warm_up` steps come before the clock starts.
        """
        ...


class LabkitSide:
    """A labkit model, as the engine runs one request: prompt chunks, then the device one token ahead of the host.

    Args:
        chunk: tokens of a prompt's chunk. replay: whether steps are replayed where they can be, at once: by the engine
            they are after some steps.
    """

    warm_up_tokens: int | None = None

    def __init__(self, model: Model, name: str = "labkit", *, chunk: int | None = None, replay: bool = True):
        self.model, self.name = model, name
        self.chunk = chunk or CHUNK
        self._replays = Replays(model, machine_here() if replay else None, patience=0)

    @property
    def replays(self) -> bool:
        """Whether decode steps have been replayed."""
        return self._replays.recorded > 0

    def prefill(self, tokens: mx.array) -> float:
        caches, last = self.model.make_caches(), tokens.size - 1
        begin = time.perf_counter()
        for first in range(0, last, self.chunk):
            piece = tokens[None, first : min(first + self.chunk, last)]
            self.model(piece, caches, Rows.single(first), logits=None)
            mx.eval([cache.state for cache in caches])
        next(self._tokens(caches, int(tokens[last].item()), last))
        seconds = time.perf_counter() - begin
        mx.synchronize()
        return seconds

    def decode(self, filled: Filled, steps: int, warm_up: int) -> tuple[float, int]:
        caches = filled.into(self.model.make_caches())
        size = sum(cache.nbytes for cache in caches)
        return _seconds_a_token(self._tokens(caches, 1, filled.context), steps, warm_up), size

    def _tokens(self, caches: list, token: int, position: int) -> Iterator[int]:
        """Tokens as the host reads them; the next one is on its way before one is read."""
        return DirectRow(self.model, caches, position, self._replays).tokens(token)


class MlxLmSide:
    """mlx-lm's module through mlx-lm's own `generate_step`, on mlx-lm's own caches.

    Args:
        module: evaluated, in evaluation mode.
        context: entered around everything that is computed (the fair line's kernels).
        warm_up_tokens: see `Side`.
    """

    def __init__(
        self,
        module: Any,
        name: str = RELEASED,
        *,
        context: Callable[[], Any] = contextlib.nullcontext,
        warm_up_tokens: int | None = None,
    ):
        module.eval()  # a module starts in training mode, in which mlx-lm leaves its kernels off
        self.module, self.name, self.warm_up_tokens = module, name, warm_up_tokens
        self._context = context

    def prefill(self, tokens: mx.array) -> float:
        with self._context():
            begin = time.perf_counter()
            next(self._tokens(tokens, self._caches(), 1))
            seconds = time.perf_counter() - begin
            mx.synchronize()
        return seconds

    def decode(self, filled: Filled, steps: int, warm_up: int) -> tuple[float, int]:
        with self._context():
            caches = filled.into_mlx_lm(self._caches())
            size = sum(cache.nbytes for cache in caches)
            tokens = self._tokens(mx.array([1], dtype=mx.int32), caches, warm_up + steps + 2)
            return _seconds_a_token(tokens, steps, warm_up), size

    def _tokens(self, prompt: mx.array, caches: list, count: int) -> Any:
        from mlx_lm.generate import generate_step

        return (token for token, _ in generate_step(prompt, self.module, max_tokens=count, prompt_cache=caches))

    def _caches(self) -> list:
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self.module)


def sides_for(
    module: Any, model: Model, against: Sequence[str], *, name: str = "labkit", chunk: int | None = None
) -> list[Side]:
    """labkit's model first, then each opponent that this device can show.

    Args:
        module: mlx-lm's module with the same weights.
        model: labkit's graph.
        against: "mlx-lm" (as released, and on CUDA the fair line too).
        name: of labkit's side. chunk: tokens of its prompts a forward.
    """
    sides: list[Side] = [LabkitSide(model, name, chunk=chunk)]
    if "mlx-lm" in against:
        fair = devices.this_device().kind == "cuda" and _has_deltanet(module)
        # A loop over tokens compiles nothing for longer prompts, and is slow.
        sides.append(MlxLmSide(module, warm_up_tokens=32 if fair else None))
        if fair:
            sides.append(MlxLmSide(module, FAIR, context=own_deltanet))
    return sides


def _has_deltanet(module: Any) -> bool:
    return any("A_log" in part for part in module.modules())


def _seconds_a_token(tokens: Any, steps: int, warm_up: int) -> float:
    for _ in range(warm_up + 1):
        next(tokens)
    begin = time.perf_counter()
    for _ in range(steps):
        next(tokens)
    seconds = time.perf_counter() - begin
    tokens.close()
    mx.synchronize()
    return seconds / steps
