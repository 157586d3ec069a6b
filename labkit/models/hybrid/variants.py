"""The switches of the hybrid: one for each mechanism that an ablation turns off, all at their best by default."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints


@dataclass(frozen=True)
class Variants:
    """How the hybrid computes. The defaults are the engine; every other value is one mechanism's control.

    Switches act where kernels run (a GPU, or a target asked for with `labkit.kernels.use_target`); where MLX computes
    on a CPU left alone, its own operations are used whatever they say.

    Attributes:
        experts: prompts' routed rows. "load": tiles of sorted rows, as high as the experts' mean load asks for;
            "tile16": the same with tiles of 16 rows always; "gather": every token reads its experts' weights for
            itself, nothing is sorted or shared; "before": all experts' weights are written as floats first, then
            multiplied with the sorted rows by MLX's grouped product.
        routing: where experts are chosen and rows grouped. "device": one or two launches, no shape depends on them;
            "host": the indices are read back and sorted there, a wait for the device in every layer.
        delta: prompts through Gated DeltaNet. "auto": chunks of matrix products where tensor cores make them faster,
            else the scan; "scan": tokens in order, the state in registers; "chunked": matrix products always;
            "blocked": tokens in order, the state in memory between blocks of 32.
        heads: decode attention. "packed": one read of a KV head serves up to eight query heads; "unpacked": each query
            head reads for itself.
        columns: which columns a threadgroup of decode attention takes. "general": equal shares of what is visible;
            "fixed": blocks of 512; "by_context": general below 32K columns of context, fixed from there on.
        loads: decode attention's reads. "wide": vectors, neighbouring lanes side by side; "single": element by element.
        fuse_experts: gate and up projections and SwiGLU of the experts in one launch.
        fuse_choice: choosing a few tokens' experts in the launch of their gate and up projections.
        fuse_combine: down projection, routing weights and the shared expert in one launch.
        fuse_norm: the residual stream's addition and the norm before a mixer in the launch of its projections, where
            these are our kernel for few rows: on CUDA from one row on, on Metal from two on.
        fuse_queries: splitting, norms, rotation and the cache's new column in one launch before attention.
        fuse_recurrence: convolution, recurrence and gated norm of a decode step in one launch.
        dequantise: matrix products of prompts. "auto": by the number of rows; "in_tile": weights become floats inside
            the tile; "before": the whole matrix is written as floats first.
        decode_rows: products of a few rows. "gemv": kernels that read each weight once for all rows; "tile": the
            prompts' tiles; "own": labkit's kernels for up to 320 rows, also where MLX's product is the cheaper launch;
            a decode step is then labkit's launches alone, which can be recorded.
        compiled: whether a decode step is built once (`mx.compile`) and replayed, or built anew for each token.
        kv: where a decoded token's keys and values go. "tail": into a small tail beside the settled buffer; "whole":
            into the buffer, which a back end without in-place writes copies.
        persistent: launches of a decode step whose threadgroups wait for each other. "experts": norm, router and sparse
            MLP of a layer in one; "layers": a whole layer in one, for one token of each row. Where Metal computes,
            both are refused: it promises no progress across threadgroups.
        stream: the residual stream between layers. "rounded": to the activations' dtype at each addition; "float32":
            never, for two bytes more a value that every norm reads and writes. On a CPU too. Not with `persistent`.
    """

    experts: Literal["load", "tile16", "gather", "before"] = "load"
    routing: Literal["device", "host"] = "device"
    delta: Literal["auto", "scan", "chunked", "blocked"] = "auto"
    heads: Literal["packed", "unpacked"] = "packed"
    columns: Literal["general", "fixed", "by_context"] = "general"
    loads: Literal["wide", "single"] = "wide"
    fuse_experts: bool = True
    fuse_choice: bool = True
    fuse_combine: bool = True
    fuse_norm: bool = True
    fuse_queries: bool = True
    fuse_recurrence: bool = True
    dequantise: Literal["auto", "in_tile", "before"] = "auto"
    decode_rows: Literal["gemv", "tile", "own"] = "gemv"
    compiled: bool = True
    kv: Literal["tail", "whole"] = "tail"
    persistent: Literal["off", "experts", "layers"] = "off"
    stream: Literal["rounded", "float32"] = "rounded"

    def __post_init__(self):
        for name, allowed in choices().items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is one of {', '.join(map(repr, allowed))}, not {getattr(self, name)!r}")
        if self.stream == "float32" and self.persistent != "off":
            raise ValueError("persistent launches keep the stream in the activations' dtype: leave one switch alone")


def choices() -> dict[str, tuple[Any, ...]]:
    """Each switch's values, the default first."""
    hints = get_type_hints(Variants)
    return {
        field.name: (True, False) if hints[field.name] is bool else get_args(hints[field.name])
        for field in fields(Variants)
    }
