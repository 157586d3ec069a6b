"""Faster forms of the trunk's layers for training on a GPU. Same parameters, same mathematics; tests hold them to
transformers' own.

`install(model)` replaces the forward methods of transformers' modules:
- RMSNorm by torch's fused op, the embedding by a lookup that a CUDA graph can capture,
- the sparse MoE block by a sort, two grouped matrix products and permutations whose backward is a gather (no atomics),
- the DeltaNet by the chunk rule of `delta.py`, which has no loop over the rows of a chunk.
"""

import torch
import torch.nn.functional as F
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen

from . import delta
from .trunk import TinyHybrid


class _Dispatch(torch.autograd.Function):
    """x [T, D] -> the rows of x in expert order [T * k, D]."""

    @staticmethod
    def forward(ctx, x, order, inverse, top_k):
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x[order // top_k]

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return grad[inverse].view(-1, ctx.top_k, grad.shape[-1]).sum(1), None, None, None


class _Combine(torch.autograd.Function):
    """y [T * k, D] in expert order -> the sum of each token's k rows [T, D]."""

    @staticmethod
    def forward(ctx, y, order, inverse, top_k):
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return y[inverse].view(-1, top_k, y.shape[-1]).sum(1)

    @staticmethod
    def backward(ctx, grad):
        (order,) = ctx.saved_tensors
        return grad[order // ctx.top_k], None, None, None


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows of x [S, K], grouped by expert up to `ends` [E], times weight [E, N, K]^T."""
    if x.is_cuda:
        return torch._grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    starts = [0, *ends.tolist()]
    return torch.cat([x[a:b] @ w.T for a, b, w in zip(starts, starts[1:], weight, strict=False)])


def moe_forward(block: qwen.Qwen3_5MoeSparseMoeBlock, states: torch.Tensor) -> torch.Tensor:
    """The block's output; its load-balancing loss lands in `block.balance_loss`, its load is added to `block.load`."""
    x = states.reshape(-1, states.shape[-1])
    experts, top_k, number = block.experts, block.gate.top_k, block.gate.num_experts
    probabilities = F.softmax(F.linear(x, block.gate.weight).float(), dim=-1)
    weights, chosen = torch.topk(probabilities, top_k, dim=-1)
    weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)

    flat = chosen.reshape(-1)
    by_expert, order = torch.sort(flat, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    ends = torch.searchsorted(by_expert, torch.arange(number, device=order.device), right=True).to(torch.int32)
    load = torch.diff(ends, prepend=ends.new_zeros(1)).float()
    block.balance_loss = number * (probabilities.mean(0) * load / x.shape[0]).sum()
    if hasattr(block, "load"):
        block.load += load

    rows = _Dispatch.apply(x, order, inverse, top_k)
    gate, up = grouped_linear(rows, experts.gate_up_proj, ends).chunk(2, dim=-1)
    middle = F.silu(gate) * up * weights.reshape(-1)[order].unsqueeze(-1)
    routed = _Combine.apply(grouped_linear(middle, experts.down_proj, ends), order, inverse, top_k)
    shared = torch.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)
    return (routed + shared).view_as(states)


class _Lookup(torch.autograd.Function):
    """Rows of the embedding matrix; every row learns, also the padding token's, since it is <|endoftext|> too."""

    @staticmethod
    def forward(ctx, weight, tokens):
        ctx.save_for_backward(tokens)
        ctx.like = weight.shape, weight.dtype
        return weight[tokens]

    @staticmethod
    def backward(ctx, grad):
        (tokens,) = ctx.saved_tensors
        shape, dtype = ctx.like
        total = torch.zeros(shape, dtype=torch.float32, device=grad.device)
        return total.index_add_(0, tokens.reshape(-1), grad.reshape(-1, shape[1]).float()).to(dtype), None


def embed_forward(table: torch.nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
    return _Lookup.apply(table.weight, tokens)


def norm_forward(norm: qwen.Qwen3_5MoeRMSNorm, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], 1.0 + norm.weight, norm.eps)


def delta_forward(net: qwen.Qwen3_5MoeGatedDeltaNet, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
    batch, length, _ = hidden_states.shape
    mixed = delta.short_convolution(net.in_proj_qkv(hidden_states), net.conv1d.weight.squeeze(1))
    query, key, value = torch.split(mixed, [net.key_dim, net.key_dim, net.value_dim], dim=-1)
    out = delta.chunk_rule(
        query.reshape(batch, length, -1, net.head_k_dim),
        key.reshape(batch, length, -1, net.head_k_dim),
        value.reshape(batch, length, -1, net.head_v_dim),
        -net.A_log.float().exp() * F.softplus(net.in_proj_a(hidden_states).float() + net.dt_bias.float()),
        net.in_proj_b(hidden_states).sigmoid(),
    )
    gate = net.in_proj_z(hidden_states).view_as(out)
    out = F.rms_norm(out, out.shape[-1:], net.norm.weight, net.layer_norm_epsilon) * F.silu(gate)
    return net.out_proj(out.reshape(batch, length, -1))


def install(model: TinyHybrid) -> None:
    """Give the modules of `model` their fast forwards."""
    forwards = {
        qwen.Qwen3_5MoeSparseMoeBlock: moe_forward,
        qwen.Qwen3_5MoeRMSNorm: norm_forward,
        qwen.Qwen3_5MoeGatedDeltaNet: delta_forward,
        torch.nn.Embedding: embed_forward,
    }
    for module in model.modules():
        fast = forwards.get(type(module))
        if fast is not None:
            module.forward = fast.__get__(module)


def moe_blocks(model: TinyHybrid) -> list[qwen.Qwen3_5MoeSparseMoeBlock]:
    return [module for module in model.modules() if isinstance(module, qwen.Qwen3_5MoeSparseMoeBlock)]
