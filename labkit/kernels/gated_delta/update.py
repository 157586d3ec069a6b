"""The gated delta rule by whichever form is fastest for the call."""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.door import takes_arrays
from labkit.kernels.gated_delta.chunks import Tensor, run_chunked, takes_tensor_cores
from labkit.kernels.gated_delta.recurrence import run_scan
from labkit.kernels.gated_delta.shapes import RuleInputs
from labkit.kernels.targets import target_in_use

CHUNKED_FROM = 128
"""Tokens from which tensor cores are taken on CUDA: two chunks. H200 (data/measured/h200_gated_delta.json), scan and
chunked form with remainders: 87 and 78 us at 128 tokens, 131 and 106 at 256, 203 and 143 at 512, 337 and 226 at 1,024,
1,253 and 535 at 4,096. Fewer than 128 were not measured.

Without remainders 4,096 tokens took 370 us, for errors of 2.3e-3 of the state instead of 3.5e-6, and of y 3.3e-3
instead of bf16's own 1.7e-3: too much for a state that lives as long as the request."""


@takes_arrays
def gated_delta_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
    spans: mx.array | None = None,
    *,
    invariant: bool = False,
    target: str | None = None,
) -> tuple[mx.array, mx.array]:
    """The gated delta rule over the tokens of each row: `scan`, or `chunked` where tensor cores make it faster.

    Args:
        q, k, v, log_decay, beta, state, spans, target: as for `scan`.
        invariant: always scan, so that no bit depends on how tokens are cut into calls.

    Returns:
        y and the new state, as `scan`. The chunked form keeps what it rounds to bf16 with its remainder: y differs from
        the scan's by its own rounding, the state by less than 1e-5 of its size.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    rule = RuleInputs.checked(q, k, v, log_decay, beta, state, spans)
    tensor_cores = target_in_use(target) == "cuda" and takes_tensor_cores(rule)
    if tensor_cores and rule.shape.length >= CHUNKED_FROM and not invariant:
        return run_chunked(rule, Tensor(split=True), target)
    return run_scan(rule, target=target)
