"""Drawing a token from filtered logits in two launches, whatever the filters keep.

A draw is the best of logit / temperature + Gumbel noise among the tokens that the filters keep, so no sum over the kept
ones is needed, and no order of adding can change it. The noise of a token is a function of (seed, step, token):
neighbours, the batch's shape and the row's place in it cannot touch a draw.

1. `sample_chunks`, a threadgroup a chunk: the chunk's largest logit, its mass, its best token.
2. `sample_rows`, a threadgroup a row: the best of all is the draw unless a filter rejects it. top-k, top-p and min-p
   each keep an upper set of the tokens ordered by logit, so after a rejection only the tokens above the rejected one
   matter. Chunks whose largest logit is below it are not read again, and nothing is ever sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from labkit.kernels.door import takes_arrays
from labkit.kernels.header import Header
from labkit.kernels.headers import __path__ as _headers
from labkit.kernels.launch import Kernel
from labkit.kernels.sampling import reference
from labkit.kernels.targets import threads_that_fit

_HERE = Path(__file__).parent
_HEADER = Header.from_file(Path(_headers[0]) / "threadgroup_reduce.h", _HERE / "sampling.h")
_CHUNKS = ["chunk_max", "chunk_sum", "chunk_score", "chunk_token"]

SAMPLE_CHUNKS = Kernel.from_file(
    _HERE / "sample_chunks.metal",
    ["logits", "mask", "temperature", "seeds", "steps", "V", "W", "CHUNKS"],
    _CHUNKS,
    header=_HEADER,
    reference=reference.sample_chunks,
)
SAMPLE_ROWS = Kernel.from_file(
    _HERE / "sample_rows.metal",
    ["logits", "mask", "temperature", "top_k", "top_p", "min_p", "seeds", "steps", *_CHUNKS, "V", "W", "CHUNKS"],
    ["tokens", "logprobs"],
    header=_HEADER,
    reference=reference.sample_rows,
)

PerRow = float | int | Sequence[float] | Sequence[int] | mx.array
"""One value for all rows, or one a row."""


@takes_arrays
def sample(
    logits: mx.array,
    *,
    temperature: PerRow,
    seed: PerRow,
    step: PerRow,
    top_k: PerRow = 0,
    top_p: PerRow = 1.0,
    min_p: PerRow = 0.0,
    mask: mx.array | None = None,
    target: str | None = None,
) -> tuple[mx.array, mx.array]:
    """Draw the next token of each row on the device.

    Args:
        logits: [B, V] float32, float16 or bfloat16. NaN is never drawn and counts for nothing; +inf as the largest
            float.
        temperature: divides the logits; below 1e-6 the largest logit is taken, the lowest token among equals.
        seed: of a row's draws, 64 bits. step: number of the token to draw, 32 bits. A draw depends on nothing else of
            the row's place, its neighbours or the batch.
        top_k: keep this many of the most likely tokens, the lower ones among equals; 0 keeps all.
        top_p: keep the most likely tokens that together reach this probability, equal ones together; 0 or 1 keeps all.
        min_p: drop tokens below this share of the most likely one's probability.
        mask: [B, ceil(V / 32)] uint32, permitted tokens as bits, lowest bit first; all without it.
        target: where to run (`labkit.kernels.targets`).

        The filters look at the distribution before the temperature, as mlx-lm's do.

    Returns:
        tokens [B] uint32; logprobs [B] float32, the token's log-probability before temperature and filters, but after
        the mask. A row in which nothing is permitted gives token 0 and -inf.

        Targets agree unless two perturbed scores, or a filter's bound and a token, are within fp32 rounding of each
        other.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: mlx-lm's `sample_utils` for the filters; Gumbel-max, Maddison et al. 2014 (arXiv 1411.0030); Philox4x32-10,
    Salmon et al. 2011; rejection instead of sorting as in FlashInfer's samplers, here with fixed noise, hence exact.
    """
    arguments = (logits, temperature, seed, step, mask)
    chunks = SAMPLE_CHUNKS(**sample_chunks_call(*arguments), target=target)
    return tuple(SAMPLE_ROWS(**sample_rows_call(*arguments, top_k, top_p, min_p, chunks), target=target))


def sample_chunks_call(
    logits: mx.array,
    temperature: PerRow,
    seed: PerRow,
    step: PerRow,
    mask: mx.array | None = None,
    threads: int = 256,
) -> dict:
    """The arguments of `SAMPLE_CHUNKS`, with chunks of 4 * threads tokens. Raises ValueError for what does not fit."""
    rows, vocabulary, mask, words = _check(logits, mask)
    chunks = -(-vocabulary // (4 * threads))
    return {
        "inputs": [
            logits,
            mask,
            _per_row("temperature", temperature, rows, mx.float32),
            _per_row("seed", seed, rows, mx.uint64),
            _per_row("step", step, rows, mx.uint32),
            vocabulary,
            words,
            chunks,
        ],
        "template": [("MASKED", words > 0), ("THREADS", threads)],
        "grid": (chunks * threads, rows, 1),
        "threadgroup": (threads, 1, 1),
        "output_shapes": [(rows, chunks)] * 4,
        "output_dtypes": [mx.float32, mx.float32, mx.float32, mx.uint32],
    }


def sample_rows_call(
    logits: mx.array,
    temperature: PerRow,
    seed: PerRow,
    step: PerRow,
    mask: mx.array | None,
    top_k: PerRow,
    top_p: PerRow,
    min_p: PerRow,
    chunks: Sequence[mx.array],
    chunk_threads: int = 256,
    threads: int = 1024,
) -> dict:
    """The arguments of `SAMPLE_ROWS` on the outputs of `SAMPLE_CHUNKS`, which ran with `chunk_threads`.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    rows, vocabulary, mask, words = _check(logits, mask)
    count = -(-vocabulary // (4 * chunk_threads))
    if any(chunk.shape != (rows, count) for chunk in chunks):
        raise ValueError(f"chunks need shape {(rows, count)}, not {[chunk.shape for chunk in chunks]}")
    threads = threads_that_fit(min(threads, max(32, 32 * count)))  # a simdgroup a chunk
    return {
        "inputs": [
            logits,
            mask,
            _per_row("temperature", temperature, rows, mx.float32),
            _per_row("top_k", top_k, rows, mx.int32),
            _per_row("top_p", top_p, rows, mx.float32),
            _per_row("min_p", min_p, rows, mx.float32),
            _per_row("seed", seed, rows, mx.uint64),
            _per_row("step", step, rows, mx.uint32),
            *chunks,
            vocabulary,
            words,
            count,
        ],
        "template": [
            ("MASKED", words > 0),
            ("FILTERED", _may_filter(top_k, top_p)),
            ("CHUNK", 4 * chunk_threads),
            ("THREADS", threads),
        ],
        "grid": (rows * threads, 1, 1),
        "threadgroup": (threads, 1, 1),
        "output_shapes": [(rows,), (rows,)],
        "output_dtypes": [mx.uint32, mx.float32],
    }


def _check(logits: mx.array, mask: mx.array | None) -> tuple[int, int, mx.array, int]:
    if logits.ndim != 2 or logits.size == 0:
        raise ValueError(f"logits need shape [B, V] with at least one value, not {logits.shape}")
    rows, vocabulary = logits.shape
    if mask is None:
        return rows, vocabulary, _NO_MASK, 0
    words = -(-vocabulary // 32)
    if mask.shape != (rows, words) or mask.dtype != mx.uint32:
        raise ValueError(
            f"mask needs shape {(rows, words)}, uint32, for logits {logits.shape}; not {mask.shape} {mask.dtype}"
        )
    return rows, vocabulary, mask, words


def _may_filter(top_k: PerRow, top_p: PerRow) -> bool:
    # What is an array may hold anything; what Python knows need not be looked at on the device.
    if isinstance(top_k, mx.array) or isinstance(top_p, mx.array):
        return True
    return bool((np.asarray(top_k) > 0).any() or ((np.asarray(top_p) > 0) & (np.asarray(top_p) < 1)).any())


def _per_row(name: str, value: PerRow, rows: int, dtype: mx.Dtype) -> mx.array:
    if isinstance(value, mx.array):
        array = value
    else:
        try:
            array = mx.array(np.asarray(value, dtype=_NUMPY[dtype]))  # mx.array takes no Python int from 2^63 on
        except OverflowError as error:
            raise ValueError(f"{name} must fit in {dtype}, not {value!r}") from error
    if array.shape not in ((), (1,), (rows,)):
        raise ValueError(f"{name} needs one value, or one for each of {rows} rows, not shape {array.shape}")
    array = array.astype(dtype)
    return array if array.shape == (rows,) else mx.broadcast_to(array.reshape(-1), (rows,))


_NUMPY = {mx.float32: np.float32, mx.int32: np.int32, mx.uint32: np.uint32, mx.uint64: np.uint64}
_NO_MASK = mx.zeros((1,), dtype=mx.uint32)
