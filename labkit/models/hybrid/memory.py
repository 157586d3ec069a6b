"""Temporary memory of a chunk of a prompt, before it is run.

What lives at once is known layer by layer: the residual stream all the way, and around it what a mixer or an MLP holds
at its widest moment. A GPU is given layers ahead, and keeps all that they make until it has done them. Counted are
arrays of MLX; weights and caches are not temporary, but a buffer that grows or is written anew stands beside its old
self for a moment.
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.caches.contiguous import STEP
from labkit.kernels.gated_delta.update import CHUNKED_FROM
from labkit.kernels.grouped_matmul import choose_tile
from labkit.kernels.quantized_matmul import DEQUANTIZE_FROM
from labkit.kernels.routing import max_blocks
from labkit.models.hybrid.config import ATTENTION, LINEAR, HybridConfig
from labkit.models.hybrid.sending import IN_FLIGHT


@dataclass(frozen=True)
class ChunkMemory:
    """Bytes that one chunk needs besides weights and caches, by the moment at which they are needed.

    Attributes:
        stream: the residual stream and what is to be added to it, all the way.
        delta, attention, experts: the widest moment of a layer of that kind, beyond the stream; 0 without such layers.
        growth: the old buffers of one attention layer while new ones are filled.
        logits: of the positions asked for, as float32; a head of plain floats makes them in 16 bits first.
        sent: all that the layers make which a GPU was given and has not done; 0 elsewhere.
    """

    stream: int
    delta: int
    attention: int
    experts: int
    growth: int
    logits: int
    sent: int

    @property
    def peak(self) -> int:
        """The largest sum that lives at once."""
        return self.stream + max(self.delta, self.attention + self.growth, self.experts, self.logits, self.sent)


def chunk_memory(
    config: HybridConfig,
    length: int,
    *,
    context: int = 0,
    batch: int = 1,
    itemsize: int = 2,
    stream_itemsize: int | None = None,
    shared_slots: int = 1,
    positions: int = 0,
    on_cuda: bool = True,
    sends: bool = True,
) -> ChunkMemory:
    """The temporary memory of a chunk.

    Args:
        config: the model's sizes.
        length: tokens of a row in the chunk. context: tokens before it. batch: rows.
        itemsize: bytes of an activation. stream_itemsize: of a value of the residual stream, by default the same.
        shared_slots: experts that a shared one runs as.
        positions: positions a row whose logits are asked for.
        on_cuda: whether large products write their weights as floats first, as they do there.
        sends: whether a GPU is given layers ahead (`labkit.models.hybrid.sending`).
    """
    tokens, c = batch * length, config
    row, stream_row = c.hidden * itemsize, c.hidden * (stream_itemsize or itemsize)

    def product(inputs: int, outputs: int, rows: int = tokens) -> int:
        """A product's output, and its matrix where that is written first."""
        return rows * outputs * itemsize + (inputs * outputs * itemsize if on_cuda and rows >= DEQUANTIZE_FROM else 0)

    projected = (c.conv_channels + c.delta_width + 2 * c.value_heads) * itemsize
    scanned = (c.conv_channels + c.delta_width) * itemsize + 2 * c.value_heads * 4
    chunks = 0
    if on_cuda and length >= CHUNKED_FROM and itemsize == 2 and c.key_dim == c.value_dim == 128:
        # w, u and p of the chunked form, with their remainders, and scales
        chunks = tokens * c.value_heads * (2 * (c.key_dim + c.value_dim + 64) * itemsize + 16)
    entering, leaving = product(c.hidden, projected // itemsize), product(c.delta_width, c.hidden)
    gated = tokens * c.delta_width * itemsize
    delta = max(
        tokens * row + entering,
        tokens * (projected + scanned) + chunks,
        tokens * projected + 2 * gated,
        leaving + gated,
    )
    states = batch * (c.value_heads * c.value_dim * c.key_dim * 4 + 3 * c.conv_channels * itemsize)
    made = {LINEAR: entering + tokens * scanned + chunks + states + gated + leaving}
    heads, kv = c.query_heads * c.head_dim, c.kv_heads * c.head_dim
    wide = 2 * heads + 2 * kv
    entering, leaving = product(c.hidden, wide), product(heads, c.hidden)
    attention = max(
        tokens * row + entering,
        tokens * itemsize * (wide + heads + 4 * kv),  # q, k and v apart, k and v again as the cache takes them
        tokens * itemsize * (wide + 3 * heads + 2 * kv),  # attended and gated beside them
        leaving + tokens * heads * itemsize,
    )
    growth = 2 * 2 * batch * (context + length) * kv * itemsize
    # MLX's attention is told by two masks in turn what a token sees, and what of its output counts.
    masked = 0 if on_cuda and itemsize == 2 else tokens * (2 * (context + length + STEP) + heads * itemsize)
    # Queries turned, attended and gated, keys and values turned or copied.
    made[ATTENTION] = entering + tokens * itemsize * (3 * heads + 2 * kv) + masked + leaving + growth
    mlp = _experts(c, tokens, itemsize, shared_slots) if c.sparse else product(c.hidden, 3 * c.intermediate)
    # The stream and its norm, before the mixer and before the MLP.
    down = 0 if c.sparse else product(c.intermediate, c.hidden)
    layers = [made[kind] + mlp + down + 2 * tokens * (stream_row + row) for kind in c.layer_kinds]
    ahead = max(sum(layers[first : first + IN_FLIGHT]) for first in range(len(layers)))
    kinds = set(c.layer_kinds)
    return ChunkMemory(
        stream=tokens * (2 * stream_row + row),
        delta=delta if LINEAR in kinds else 0,
        attention=attention if ATTENTION in kinds else 0,
        experts=mlp,
        growth=growth if ATTENTION in kinds else 0,
        logits=4 * batch * positions * c.vocabulary,
        sent=ahead if sends else 0,
    )


def _experts(c: HybridConfig, tokens: int, itemsize: int, shared_slots: int) -> int:
    slots, groups = c.top_k + shared_slots, c.experts + shared_slots
    assignments = tokens * slots
    routing = tokens * (c.experts + 1) * 4 + 5 * assignments * 4
    routing += 16 * max_blocks(assignments, groups, choose_tile(assignments, groups))
    hidden = assignments * c.expert_width * itemsize
    products = assignments * c.hidden * itemsize
    return tokens * c.hidden * itemsize + routing + hidden + products + tokens * c.hidden * itemsize
