"""Cross entropy of a large vocabulary without keeping the logits: chunk by chunk, the gradient is made in the forward
pass.
"""

import torch


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, weight, targets, chunks):
        states_grad = torch.empty_like(states)
        weight_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        total = torch.zeros((), dtype=torch.float32, device=weight.device)
        count = targets.numel()
        for h, y, g in zip(states.chunk(chunks), targets.chunk(chunks), states_grad.chunk(chunks), strict=True):
            logits = (h @ weight.T).float()
            log_normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
            total += (log_normaliser - logits.gather(1, y[:, None])).sum()
            logits.sub_(log_normaliser).exp_()
            logits.scatter_add_(1, y[:, None], torch.full_like(log_normaliser, -1.0))
            grad = logits.mul_(1.0 / count).to(weight.dtype)
            g.copy_(grad @ weight)
            weight_grad += grad.T @ h
        ctx.save_for_backward(states_grad, weight_grad.to(weight.dtype))
        return total / count

    @staticmethod
    def backward(ctx, grad):
        states_grad, weight_grad = ctx.saved_tensors
        return states_grad * grad, weight_grad * grad, None, None


def linear_cross_entropy(
    states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunks: int = 4
) -> torch.Tensor:
    """Mean cross entropy (nats) of softmax(states @ weight^T) against targets; states [..., D], weight [V, D], targets
    [...].
    """
    return _LinearCrossEntropy.apply(states.reshape(-1, states.shape[-1]), weight, targets.reshape(-1), chunks)
