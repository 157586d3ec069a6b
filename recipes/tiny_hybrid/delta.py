"""The gated delta rule in plain torch for training: chunk by chunk, without a loop over the rows of a chunk.

With decay a_t = exp(g_t) and S [K, V] the state of a head:
    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T,    o_t = S_t^T q_t / sqrt(K)
"""

import torch
import torch.nn.functional as F

CHUNK = 64


def short_convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Causal depthwise convolution and silu; x [B, L, D], weight [D, W]."""
    width = weight.shape[-1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    return F.silu(sum(padded[:, i : i + x.shape[1]] * weight[:, i] for i in range(width)))


def _diagonal_blocks(matrix: torch.Tensor, size: int) -> torch.Tensor:
    """[..., C, C] -> its blocks of `size` on the diagonal [..., C / size, size, size]."""
    number = matrix.shape[-1] // size
    blocks = matrix.unflatten(-1, (number, size)).unflatten(-3, (number, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def unit_lower_inverse(matrix: torch.Tensor, size: int = 8) -> torch.Tensor:
    """(I + A)^-1 of strictly lower A [..., C, C]: blocks of 8 by powers of A, then merged pairwise.

    Powers of the whole matrix would overflow: for equal keys A^32 reaches 1e17 while the inverse stays below 1.
    """
    block = _diagonal_blocks(matrix, size)
    square = block @ block
    inverse = torch.eye(size, dtype=matrix.dtype, device=matrix.device) - block
    inverse = inverse + inverse @ square
    inverse = inverse + inverse @ (square @ square)
    while size < matrix.shape[-1]:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -(second @ _diagonal_blocks(matrix, 2 * size)[..., size:, :size] @ first)
        top = torch.cat([first, torch.zeros_like(first)], dim=-1)
        inverse = torch.cat([top, torch.cat([corner, second], dim=-1)], dim=-2)
        size *= 2
    return inverse.squeeze(-3)


class _UnitLowerInverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, matrix):
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        inverse = unit_lower_inverse(matrix)
        torch.set_float32_matmul_precision(precision)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def chunk_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """q, k [B, L, H, K]; v [B, L, HV, V]; g (log decay), beta [B, L, HV] -> [B, L, HV, V]. fp32 inside; q and k are
    normalised here.
    """
    batch, length, heads, _ = v.shape
    kind = v.dtype
    chunks = -(-length // CHUNK)
    spread = heads // q.shape[2]

    def cut(x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x.float(), (0, 0, 0, 0, 0, chunks * CHUNK - length))
        return x.view(batch, chunks, CHUNK, heads, -1).permute(0, 3, 1, 2, 4)  # [B, HV, N, C, D]

    q = cut(_normalised(q.float()).repeat_interleave(spread, 2)) * q.shape[-1] ** -0.5
    k = cut(_normalised(k.float()).repeat_interleave(spread, 2))
    v, g, beta = cut(v), cut(g[..., None]).squeeze(-1).cumsum(-1), cut(beta[..., None])
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    mixing = ((beta * k) @ k.mT * decay).tril(-1)
    right = torch.cat([beta * v, beta * k * g.exp()[..., None]], dim=-1)
    u, w = (_UnitLowerInverse.apply(mixing) @ right).split([v.shape[-1], k.shape[-1]], dim=-1)
    last = g[..., -1:]
    written = (k * (last - g).exp()[..., None]).mT
    kept = last[..., None].exp()
    state, before, corrected = v.new_zeros(batch, heads, k.shape[-1], v.shape[-1]), [], []
    for u_n, w_n, written_n, kept_n in zip(*(x.unbind(2) for x in (u, w, written, kept)), strict=True):
        before.append(state)
        corrected.append(u_n - w_n @ state)
        state = state * kept_n + written_n @ corrected[-1]
    seen, scores = q * g.exp()[..., None], q @ k.mT * decay
    out = seen @ torch.stack(before, 2) + scores @ torch.stack(corrected, 2)
    out = out.permute(0, 2, 3, 1, 4).reshape(batch, chunks * CHUNK, heads, -1)
    return out[:, :length].to(kind)
