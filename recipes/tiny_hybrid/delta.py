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


class _Scan(torch.autograd.Function):
    """The part that goes chunk by chunk: S_0 = 0, C_n = u_n - w_n S_n, S_{n+1} = kept_n S_n + written_n C_n.

    u [N, T, C, V], w [N, T, C, K], written [N, T, K, C], kept [N, T, 1, 1] -> S [N, T, K, V], C [N, T, C, V]. Its
    gradient is written out: autograd would keep and add up every step of the loop, where only two products a chunk
    wait for each other.
    """

    @staticmethod
    def forward(ctx, u, w, written, kept):
        states = u.new_zeros(*w.shape[:2], w.shape[-1], u.shape[-1])
        corrected = torch.empty_like(u)
        for n in range(len(u)):
            torch.baddbmm(u[n], w[n], states[n], alpha=-1, out=corrected[n])
            if n + 1 < len(u):
                torch.baddbmm(states[n] * kept[n], written[n], corrected[n], out=states[n + 1])
        ctx.save_for_backward(w, written, kept, states, corrected)
        return states, corrected

    @staticmethod
    def backward(ctx, states_grad, corrected_grad):
        w, written, kept, states, corrected = ctx.saved_tensors
        later = torch.zeros_like(states)  # gradients of S_{n+1}
        total = torch.empty_like(corrected)  # gradients of C_n
        for n in reversed(range(len(w))):
            torch.baddbmm(corrected_grad[n], written[n].mT, later[n], out=total[n])
            if n:
                own = torch.addcmul(states_grad[n], later[n], kept[n])
                torch.baddbmm(own, w[n].mT, total[n], alpha=-1, out=later[n - 1])
        kept_grad = (later * states).sum((-2, -1), keepdim=True)
        return total, -(total @ states.mT), later @ corrected.mT, kept_grad


def _unit(x: torch.Tensor, scale: float) -> torch.Tensor:
    """scale * x / sqrt(sum x^2 + 1e-6) over the last axis, by torch's fused norm."""
    width = x.shape[-1]
    return F.rms_norm(x, (width,), x.new_full((width,), scale * width**-0.5), 1e-6 / width)


def chunk_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """q, k [B, L, H, K]; v [B, L, HV, V]; g (log decay), beta [B, L, HV] -> [B, L, HV, V]. fp32 inside; q and k are
    normalised here.

    Value heads that share a key head stand beside each other, R of them, so that the products of keys and queries are
    made once for all: [N, B, H, C, K] on the side of the keys, [N, B, H, R, C, V] on that of the values.
    """
    batch, length, heads, _ = v.shape
    kind, keys = v.dtype, q.shape[2]
    missing = -length % CHUNK

    def cut(x: torch.Tensor) -> torch.Tensor:
        """[B, L, ..., D] -> [N, B, ..., C, D], contiguous."""
        if missing:
            x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing))
        return x.unflatten(1, (-1, CHUNK)).movedim(2, -2).transpose(0, 1).contiguous().float()

    q, k = _unit(cut(q), q.shape[-1] ** -0.5), _unit(cut(k), 1.0)
    v, g, beta = (cut(x.unflatten(2, (keys, -1))) for x in (v, g[..., None], beta[..., None]))
    g = g.squeeze(-1).cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    decay = (g[..., :, None] - g[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    mixing = ((k @ k.mT).unsqueeze(3) * decay * beta).tril(-1)
    inverse = _UnitLowerInverse.apply(mixing) * beta.mT
    w = ((inverse * g.exp()[..., None, :]).flatten(3, 4) @ k).unflatten(3, (-1, CHUNK))
    last = g[..., -1:]
    written = (k.unsqueeze(3) * (last - g).exp()[..., None]).mT
    flat = (x.flatten(1, 3) for x in (inverse @ v, w, written, last[..., None].exp()))
    states, corrected = (x.unflatten(1, g.shape[1:4]) for x in _Scan.apply(*flat))
    seen, scores = q.unsqueeze(3) * g.exp()[..., None], (q @ k.mT).unsqueeze(3) * decay
    out = seen @ states + scores @ corrected
    out = out.transpose(0, 1).movedim(-2, 2).reshape(batch, length + missing, heads, -1)
    return out[:, :length].to(kind)
