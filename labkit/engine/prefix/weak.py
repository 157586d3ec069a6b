"""Callbacks that keep nobody alive: a part below tells the part above without holding it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method as a function that does not hold its object; once that is gone, it does nothing.

    With it no two parts refer to each other, and a store that nobody holds any more lets its bytes go at once.
    """
    held = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = held()
        return None if alive is None else alive(*args)

    return call
