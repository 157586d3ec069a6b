"""What fits: bytes of weights and caches against what the device has, before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from labkit import devices
from labkit.models import LoadedModel


@dataclass(frozen=True)
class Capacity:
    """The numbers that decide whether a request can ever run.

    Caches of mlx-lm's own classes (kind "foreign") do not say their sizes beforehand and are not counted: for a model
    that has some, `Adapter.limits["bytes_for"]` names the kind, and a request that passes here may still not fit.

    Attributes:
        capacity_bytes: what weights and caches together may take.
        weights_bytes: what the weights take.
        kv_bytes_per_token: what each further token takes, as long as every layer grows.
        state_bytes: what a request takes whatever its length (recurrent states).
        max_context_tokens: the longest context that fits, and that the model was made for.
    """

    capacity_bytes: int
    weights_bytes: int
    kv_bytes_per_token: int
    state_bytes: int
    max_context_tokens: int

    def as_record(self) -> dict[str, int]:
        """JSON data."""
        return asdict(self)


class CapacityError(ValueError):
    """A request that can never fit. `record` holds the code, whether a retry helps, and the numbers."""

    def __init__(self, message: str, record: dict[str, Any]):
        super().__init__(message)
        self.record = record


class Budget:
    """Sizes of requests against what the device has.

    Args:
        loaded: the model.
        capacity_bytes: what there is; the device's working set by default.
        transient: prompt tokens -> further bytes that computing them takes, where these count; monotone.

    Attributes:
        capacity: the numbers.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        capacity_bytes: int | None = None,
        *,
        transient: Callable[[int], int] = lambda tokens: 0,
    ):
        self._transient = transient
        caches = zip(loaded.model.make_caches(), loaded.model.layouts, strict=True)
        self._caches = [(type(cache), layout) for cache, layout in caches if layout is not None]
        limit = devices.this_device().working_set_bytes if capacity_bytes is None else capacity_bytes
        trained = loaded.config.get("text_config", loaded.config).get("max_position_embeddings") or (1 << 62)
        # The longest context that fits, by halving: rings stop growing, so there is no one price of a token.
        low, high = 0, trained
        while low < high:
            middle = (low + high + 1) // 2
            # The last of its tokens is the answer's: all others are a prompt.
            if loaded.weights_bytes + self.cache_bytes(middle) + transient(max(1, middle - 1)) <= limit:
                low = middle
            else:
                high = middle - 1
        layouts = [layout for _, layout in self._caches]
        self.capacity = Capacity(
            capacity_bytes=limit,
            weights_bytes=loaded.weights_bytes,
            kv_bytes_per_token=sum(layout.bytes_per_token for layout in layouts),
            state_bytes=sum(layout.bytes_fixed for layout in layouts),
            max_context_tokens=low,
        )

    def cache_bytes(self, tokens: int, *, chunk: int = 1) -> int:
        """Bytes of the caches of one request of `tokens` tokens, prefilled `chunk` at a time."""
        return sum(cache.bytes_of(layout, tokens, chunk=chunk) for cache, layout in self._caches)

    def admit(self, prompt_tokens: int, max_tokens: int, *, chunk: int) -> None:
        """Let a request pass that can fit.

        Raises:
            CapacityError: one that never will, with the seven numbers.
        """
        capacity = self.capacity
        caches = self.cache_bytes(prompt_tokens + max_tokens, chunk=min(chunk, prompt_tokens))
        required = capacity.weights_bytes + caches + self._transient(prompt_tokens)
        fits = required <= capacity.capacity_bytes
        if fits and prompt_tokens <= capacity.max_context_tokens:
            return
        record = {
            "code": "context_exceeds_capacity",
            "retryable": False,
            "prompt_tokens": prompt_tokens,
            "max_tokens": max_tokens,
            "required_bytes": required,
            "capacity_bytes": capacity.capacity_bytes,
            "weights_bytes": capacity.weights_bytes,
            "kv_bytes_per_token": capacity.kv_bytes_per_token,
            "max_context_tokens": capacity.max_context_tokens,
        }
        if fits:
            reason = f"a prompt of {prompt_tokens} tokens is longer than the context of {capacity.max_context_tokens}"
        else:
            reason = (
                f"{prompt_tokens} prompt tokens and {max_tokens} more need {required} bytes with the weights, and "
                f"{capacity.capacity_bytes} are to be had: lower max_tokens or shorten the prompt"
            )
        raise CapacityError(reason, record)
