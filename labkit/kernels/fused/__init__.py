"""Chains of small operations in one launch each.

| operation | replaces | for |
| --- | --- | --- |
| `residual_rms_norm` | add, RMSNorm | every block |
| `norm_project` | add, RMSNorm, a quantised matmul | the mixer's projections, a few rows |
| `norm_router` | add, RMSNorm, the router's quantised matmul | sparse blocks, up to 8 rows |
| `qk_norm_rope` | splitting off the gate, two RMSNorms, two rotations, layout | attention |
| `append_heads` | the same, and two writes into a tail of the cache | attention of a few new tokens |
| `output_gate` | layout, sigmoid, multiply | attention |
| `gated_rms_norm` | RMSNorm, silu, multiply | Gated DeltaNet |
| `swiglu` | sigmoid, two products | dense MLPs of more rows than a few |
| `embedding_rows` | three gathers, a dequantisation | the first thing of every forward |
| `place_columns` | counts to each token's columns | attention of a few new tokens |

`savings` says how many launches and bytes each of them saves at a given size. Other chains of the specialised engine
live with the operation they are fused into: the choice of experts with their gate and up projections and activation,
and the down projection with routing weights and shared expert, in `grouped_matmul`; the recurrence with its norm in
`gated_delta`.
"""

from __future__ import annotations

from labkit.kernels.fused.activation import SWIGLU, swiglu, swiglu_call
from labkit.kernels.fused.chains import append_heads, gated_rms_norm, norm_router, output_gate, qk_norm_rope
from labkit.kernels.fused.columns import PLACE_COLUMNS, place_columns, place_columns_call
from labkit.kernels.fused.embedding import EMBEDDING_ROWS, embedding_rows, embedding_rows_call
from labkit.kernels.fused.projection import NORM_PROJECT, norm_project, norm_project_call, norm_project_form
from labkit.kernels.fused.residual import RESIDUAL_RMS_NORM, residual_rms_norm, residual_rms_norm_call

__all__ = [
    "EMBEDDING_ROWS",
    "NORM_PROJECT",
    "PLACE_COLUMNS",
    "RESIDUAL_RMS_NORM",
    "SWIGLU",
    "append_heads",
    "embedding_rows",
    "embedding_rows_call",
    "gated_rms_norm",
    "norm_project",
    "norm_project_call",
    "norm_project_form",
    "norm_router",
    "output_gate",
    "place_columns",
    "place_columns_call",
    "qk_norm_rope",
    "residual_rms_norm",
    "residual_rms_norm_call",
    "swiglu",
    "swiglu_call",
]
