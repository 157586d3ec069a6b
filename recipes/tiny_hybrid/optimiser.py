"""Muon for the matrices and AdamW for the rest, over stacked fp32 masters.

Parameters of one block shape live as views of one stacked tensor [N, rows, columns], their gradients likewise, so a
step is a few batched operations. Attention and DeltaNet projections are split by head, gate and up matrices by half,
before orthogonalisation. Updates are scaled to an RMS of 0.2 per element (Moonlight), so that both optimisers share
one learning rate.
"""

import torch
from torch import nn

NS = (3.4445, -4.7750, 2.0315)  # quintic Newton-Schulz of the Muon reference


def orthogonalise(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Nearest semi-orthogonal matrices of a stack [N, r, c], approximately (singular values about 0.7 to 1.2)."""
    a, b, c = NS
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices  # bf16 products are slow on a CPU
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


def block_shape(name: str, parameter: nn.Parameter) -> tuple[int, int] | None:
    """(rows, columns) of the matrices that Muon sees in a parameter, or None for AdamW."""
    if parameter.ndim < 2 or name.endswith(
        (
            "embed_tokens.weight",
            "conv1d.weight",
            "mlp.gate.weight",
            "shared_expert_gate.weight",
            "in_proj_a.weight",
            "in_proj_b.weight",
        )
    ):
        return None
    rows, columns = parameter.shape[-2:]
    if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        return 256 if rows % 256 == 0 else rows, columns
    if name.endswith(("in_proj_qkv.weight", "in_proj_z.weight")):
        return 128 if rows % 128 == 0 else rows, columns
    if name.endswith("gate_up_proj"):
        return rows // 2, columns
    return rows, columns


class _Stack:
    """Working parameters and gradients as views of one tensor; an fp32 master beside it."""

    def __init__(self, parameters: list[nn.Parameter], shape: tuple[int, ...]) -> None:
        unit = 1
        for side in shape:
            unit *= side
        padded = [-(-p.numel() // unit) * unit for p in parameters]
        first = parameters[0]
        self.master = torch.zeros(sum(padded), dtype=torch.float32, device=first.device)
        self.work = torch.zeros(sum(padded), dtype=first.dtype, device=first.device)
        self.grad = torch.zeros_like(self.work)
        offset = 0
        for parameter, size in zip(parameters, padded, strict=True):
            end = offset + parameter.numel()
            self.master[offset:end] = parameter.detach().float().reshape(-1)
            self.work[offset:end] = parameter.detach().reshape(-1)
            parameter.data = self.work[offset:end].view(parameter.shape)
            parameter.grad = self.grad[offset:end].view(parameter.shape)
            offset += size
        self.shape = shape
        self.state: dict[str, torch.Tensor] = {}

    def stacked(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(-1, *self.shape)


class MuonAdamW:
    """One learning rate `lr` (a device scalar, so that a captured graph can use it), momentum and decay as given."""

    def __init__(
        self, model: nn.Module, momentum: float = 0.95, decay: float = 0.1, betas: tuple[float, float] = (0.9, 0.95)
    ) -> None:
        matrices: dict[tuple[int, int], list[nn.Parameter]] = {}
        embedding, rest = [], []
        for name, parameter in model.named_parameters():
            block = block_shape(name, parameter)
            if block:
                matrices.setdefault(block, []).append(parameter)
            elif name.endswith("embed_tokens.weight"):
                embedding.append(parameter)
            else:
                rest.append(parameter)
        self.muon = [_Stack(found, block) for block, found in matrices.items()]
        self.adam = [(_Stack(embedding, (64,)), decay), (_Stack(rest, (64,)), 0.0)]
        self.momentum, self.decay, self.betas = momentum, decay, betas
        device = self.muon[0].master.device
        self.lr = torch.zeros((), device=device)
        self.count = torch.zeros((), device=device)
        for stack in self.muon:
            stack.state["momentum"] = torch.zeros_like(stack.master)
        for stack, _ in self.adam:
            stack.state["mean"] = torch.zeros_like(stack.master)
            stack.state["square"] = torch.zeros_like(stack.master)

    def stacks(self) -> list[_Stack]:
        return self.muon + [stack for stack, _ in self.adam]

    def zero_grad(self) -> None:
        torch._foreach_zero_([stack.grad for stack in self.stacks()])

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        for stack in self.muon:
            grad, mean = stack.grad.float(), stack.state["momentum"]
            mean.lerp_(grad, 1 - self.momentum)
            update = orthogonalise(stack.stacked(torch.lerp(grad, mean, self.momentum)))  # Nesterov
            scale = 0.2 * max(stack.shape) ** 0.5
            stack.master.mul_(1 - self.lr * self.decay).sub_(update.float().reshape(-1) * (self.lr * scale))
            stack.work.copy_(stack.master)
        first, second = self.betas
        for stack, decay in self.adam:
            grad, mean, square = stack.grad.float(), stack.state["mean"], stack.state["square"]
            mean.lerp_(grad, 1 - first)
            square.lerp_(grad * grad, 1 - second)
            scaled = (mean / (1 - first**self.count)) / ((square / (1 - second**self.count)).sqrt() + 1e-8)
            stack.master.mul_(1 - self.lr * decay).sub_(scaled * self.lr)
            stack.work.copy_(stack.master)

    def state_dict(self) -> dict:
        return {"count": self.count, "stacks": [{"master": s.master, **s.state} for s in self.stacks()]}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        self.count.copy_(state["count"])
        for stack, saved in zip(self.stacks(), state["stacks"], strict=True):
            stack.master.copy_(saved["master"])
            stack.work.copy_(stack.master)
            for name, tensor in stack.state.items():
                tensor.copy_(saved[name])

    @torch.no_grad()
    def load_weights(self, model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
        """Take the parameters of `model` from `weights`, in place, and the masters from them."""
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        for stack in self.stacks():
            stack.master.copy_(stack.work)
