"""What an operation says of an argument that is not of the kind it takes."""

from __future__ import annotations

import reprlib
import types
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import mlx.core as mx

from labkit.kernels.signature import METAL_TYPES

Operation = TypeVar("Operation", bound=Callable[..., Any])


def takes_arrays(operation: Operation) -> Operation:
    """An operation that says, of an argument of the wrong kind, which one it is and what it takes.

    The annotations are read only once something has failed: a call that goes well costs a function's call more.

    Raises:
        ValueError: from the operation, whatever failed in it, where an argument is not what its annotations say, or an
            array of a dtype that no kernel takes.
    """

    @wraps(operation)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return operation(*args, **kwargs)
        except (AttributeError, TypeError, ValueError) as error:
            if message := _misfit(operation, args, kwargs):
                raise ValueError(message) from error
            raise

    return checked


def _misfit(operation: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> str | None:
    """What is wrong with the first argument that is not of its annotation's kind."""
    try:
        given = signature(operation).bind(*args, **kwargs).arguments
    except TypeError:  # an argument too many, or one without a value: Python's own words are right
        return None
    hints = get_type_hints(operation)
    for name, value in given.items():
        if name in hints and not _fits(value, hints[name]):
            remedy = "; mx.array(...) makes one" if _wants_array(hints[name]) else ""
            return f"{operation.__name__} takes {name} as {_words(hints[name])}, not {_short(value)}{remedy}"
        if isinstance(value, mx.array) and value.dtype not in METAL_TYPES:
            return f"{operation.__name__} takes no {name} of dtype {value.dtype}"
    return None


def _fits(value: Any, hint: Any) -> bool:
    kinds = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, kind) for kind in kinds)
    if get_origin(hint) is Literal:
        return value in kinds
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    if hint is float:
        return isinstance(value, (int, float))
    return not isinstance(hint, type) or isinstance(value, hint)


def _wants_array(hint: Any) -> bool:
    return hint is mx.array or mx.array in get_args(hint)


def _words(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_words(kind) for kind in get_args(hint))
    if hint is mx.array:
        return "mx.array"
    return "None" if hint is type(None) else hint.__name__ if isinstance(hint, type) else str(hint)


def _short(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} of shape {value.shape} and dtype {value.dtype}"
    return f"{type(value).__name__} {reprlib.repr(value)}"
