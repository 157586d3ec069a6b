"""What is done to all layers of a model, or to none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.caches.base import Cache


def commit(caches: Sequence[Cache], accepted: Any) -> None:
    """End the span that is open in all of these: keep its first `accepted` tokens, an int or one by row.

    Raises:
        ValueError, Unsupported: as `Cache.commit`, of whichever layer. Every span stays as it is, and may be rolled
            back: layers that have committed beside others that have not would hold different tokens.
    """
    for cache in caches:
        cache.check_commit(accepted)
    for cache in caches:
        cache.commit(accepted)
