"""The sides of a comparison: whatever gives logits at every position of a text, given the tokens before it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from labkit.parity.forms import Form
from labkit.parity.predictions import FullLogits, Prediction

if TYPE_CHECKING:
    import mlx.core as mx

    from labkit.models import Model

# One forward: the next tokens [w] int32 and the position of the first, to logits [w, V] float32.
Forward = Callable[[np.ndarray, int], np.ndarray]


@runtime_checkable
class Side(Protocol):
    """What `teacher_forced` needs of a side.

    Attributes:
        name: how reports call it.
        arithmetic: "float32", "tf32", "bfloat16" or "float16", the coarsest rounding in its matrix products.
        form: in which steps it reads a window.
        vocab_size: number of logits of a position.
    """

    name: str
    arithmetic: str
    form: Form
    vocab_size: int

    def predict(self, window: np.ndarray) -> Iterator[Prediction]:
        """Predictions of window[1:], each from the reference prefix before it.

        `window` is [n + 1] int32; the predictions together cover n positions, in order.
        """
        ...


class ForwardSide(ABC):
    """A side that computes: forwards of the form's widths through caches that live as long as a window."""

    name: str
    arithmetic: str
    form: Form
    vocab_size: int

    @abstractmethod
    def begin(self) -> Forward:
        """Fresh caches, and the function that moves them on."""

    def predict(self, window: np.ndarray) -> Iterator[Prediction]:
        forward = self.begin()
        position = 0
        for width in self.form.widths(len(window) - 1, self.vocab_size):
            yield FullLogits(forward(np.asarray(window[position : position + width], dtype=np.int32), position))
            position += width


class MlxLmSide(ForwardSide):
    """mlx-lm's own model on its own caches.

    Args:
        model: a module as `mlx_lm.load` returns it.
        form: in which steps it reads.
        name: how reports call it.
    """

    def __init__(self, model: Any, form: Form | None = None, *, name: str = "mlx-lm") -> None:
        self.model = model
        self.form = form or Form()
        self.name = name
        self.arithmetic = mlx_arithmetic(floating_dtype(model))
        self.vocab_size = _vocab_size(model)

    @classmethod
    def open(cls, folder: str | Path, form: Form | None = None, *, dtype: str | None = None) -> MlxLmSide:
        """Load a local folder in mlx-lm's format; `dtype` ("float32", "bfloat16") casts all but the packed codes.

        Without `dtype` the device's default holds: float32 on a CPU, the checkpoint's own on a GPU.
        """
        import mlx.core as mx
        from mlx_lm.utils import load_model

        model, _ = load_model(Path(folder), lazy=True)
        if dtype is None and mx.default_device().type == mx.cpu:
            dtype = "float32"
        if dtype is not None:
            cast_floating(model, getattr(mx, dtype))
        return cls(model, form)

    def begin(self) -> Forward:
        from mlx_lm.models.cache import make_prompt_cache

        caches = make_prompt_cache(self.model)
        return lambda tokens, position: _as_numpy(self.model(_row(tokens), cache=caches)[0])


class LabkitSide(ForwardSide):
    """labkit's model on labkit's caches, through the forward contract.

    Args:
        model: a `labkit.models.Model`.
        form: in which steps it reads.
        name: how reports call it.
    """

    def __init__(self, model: Model, form: Form | None = None, *, name: str = "labkit") -> None:
        self.model = model
        self.form = form or Form()
        self.name = name
        self.arithmetic = mlx_arithmetic(str(model.dtype).rpartition(".")[2])
        self.vocab_size = model.vocab_size

    def begin(self) -> Forward:
        from labkit.models import Rows

        caches = self.model.make_caches(1)

        def forward(tokens: np.ndarray, position: int) -> np.ndarray:
            return _as_numpy(self.model(_row(tokens), caches, Rows.single(position), logits="all").logits[0])

        return forward


def mlx_arithmetic(dtype: str) -> str:
    """The rounding of MLX's matrix products for activations of `dtype`: a GPU may compute float32 ones in tf32."""
    import mlx.core as mx

    on_gpu = mx.default_device().type == mx.gpu
    return "tf32" if dtype == "float32" and on_gpu and os.environ.get("MLX_ENABLE_TF32", "1") != "0" else dtype


def floating_dtype(model: Any) -> str:
    """The coarsest floating dtype among a module's parameters, which is what its activations are rounded to."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    found = {value.dtype for _, value in tree_flatten(model.parameters()) if mx.issubdtype(value.dtype, mx.floating)}
    for dtype in (mx.bfloat16, mx.float16, mx.float32):
        if dtype in found:
            return str(dtype).rpartition(".")[2]
    raise ValueError("the model has no floating parameters: were its weights loaded?")


def cast_floating(model: Any, dtype: mx.Dtype) -> None:
    """Cast a module's floating parameters, quantisation scales included, in place.

    Packed codes stay as they are, and so do the parameters that the model itself wants kept (A_log, by its
    `cast_predicate`), unless the cast widens them.
    """
    import mlx.core as mx
    from mlx.utils import tree_map_with_path

    may_cast = getattr(model, "cast_predicate", None) or (lambda path: True)

    def cast(path: str, value: mx.array) -> mx.array:
        narrowed = value.dtype.size > dtype.size and not may_cast(path)
        return value.astype(dtype) if mx.issubdtype(value.dtype, mx.floating) and not narrowed else value

    model.update(tree_map_with_path(cast, model.parameters()))


def _vocab_size(model: Any) -> int:
    import mlx.core as mx

    # Every module under mlx-lm's roof answers for its own head; shapes alone cost no computation.
    return model(mx.zeros((1, 1), dtype=mx.int32)).shape[-1]


def _row(tokens: np.ndarray) -> mx.array:
    import mlx.core as mx

    return mx.array(tokens, dtype=mx.int32)[None]


def _as_numpy(logits: mx.array) -> np.ndarray:
    import mlx.core as mx

    return np.array(logits.astype(mx.float32))
