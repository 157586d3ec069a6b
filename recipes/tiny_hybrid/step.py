"""One optimisation step over a fixed batch shape, its forward and backward pass captured as a CUDA graph."""

import torch

from . import fast
from .loss import linear_cross_entropy
from .optimiser import MuonAdamW
from .schedule import BALANCE_WEIGHT, MTP_ROWS, MTP_WEIGHT
from .trunk import TinyHybrid


class Step:
    """A step over [rows, length + 2] tokens; `losses` [4] accumulates total, next token, token after next, balance."""

    def __init__(self, model: TinyHybrid, optimiser: MuonAdamW, rows: int, length: int) -> None:
        self.model, self.optimiser, self.rows, self.length = model, optimiser, rows, length
        device = model.embedding.device
        self.tokens = torch.zeros((rows, length + 2), dtype=torch.int64, device=device)
        self.losses = torch.zeros(4, device=device)
        self.rotary = model.rotary(rows, length)
        self.graph = None

    def forward_backward(self) -> None:
        model, length = self.model, self.length
        inputs, targets, later = self.tokens[:, :length], self.tokens[:, 1 : length + 1], self.tokens[:, 2:]
        some = max(1, self.rows // MTP_ROWS)
        hidden = model.hidden(inputs, self.rotary)
        next_loss = linear_cross_entropy(hidden, model.embedding, targets)
        embedded = model.trunk.model.embed_tokens(targets[:some])
        guess = model.mtp(embedded, hidden[:some], tuple(part[:some] for part in self.rotary))
        mtp_loss = linear_cross_entropy(guess, model.embedding, later[:some])
        blocks = fast.moe_blocks(model)
        balance = sum(block.balance_loss for block in blocks) / len(blocks)
        loss = next_loss + MTP_WEIGHT * mtp_loss + BALANCE_WEIGHT * balance
        self.optimiser.zero_grad()
        loss.backward()
        self.losses += torch.stack([loss, next_loss, mtp_loss, balance]).detach()

    def capture(self) -> None:
        """Run the pass three times, then record it. Where recording fails the step runs op by op, which is slower."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.forward_backward()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.forward_backward()
        except RuntimeError as error:
            print(f"no CUDA graph: {error}", flush=True)
            return
        self.graph = graph

    def __call__(self, tokens: torch.Tensor, rate: float) -> None:
        self.tokens.copy_(tokens)
        self.optimiser.lr.fill_(rate)
        if self.graph:
            self.graph.replay()
        else:
            self.forward_backward()
        self.optimiser.step()
