"""The torch model: transformers' own Qwen3.5 MoE text model as the trunk, and a next-next-token (MTP) head of Qwen's
form.

The head at position i takes the trunk's final-norm output h_i and the embedding of token i+1, and predicts token i+2
through the trunk's own output matrix:

    m = fc([norm_e(embed(t_{i+1})), norm_h(h_i)]);  m = decoder layer with full attention (m);  logits = norm(m) @
    embed^T
"""

import math

import torch
from torch import nn
from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen

from . import shape


def config(**changes: object) -> Qwen3_5MoeTextConfig:
    return Qwen3_5MoeTextConfig(**{**shape.TRUNK, **changes})


class MTPHead(nn.Module):
    """Qwen's MTP block; its parameters are saved under `mtp.*`."""

    def __init__(self, cfg: Qwen3_5MoeTextConfig) -> None:
        super().__init__()
        full = next(i for i, kind in enumerate(cfg.layer_types) if kind == "full_attention")
        self.fc = nn.Linear(2 * cfg.hidden_size, cfg.hidden_size, bias=False)
        self.pre_fc_norm_embedding = qwen.Qwen3_5MoeRMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps)
        self.pre_fc_norm_hidden = qwen.Qwen3_5MoeRMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps)
        self.layers = nn.ModuleList([qwen.Qwen3_5MoeDecoderLayer(cfg, full)])
        self.norm = qwen.Qwen3_5MoeRMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """embedded [B, L, D] of the next tokens, hidden [B, L, D] of the trunk -> [B, L, D] for the output matrix."""
        joined = torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], dim=-1)
        mixed = self.layers[0](self.fc(joined), position_embeddings=rotary, attention_mask=None)
        return self.norm(mixed)


class TinyHybrid(nn.Module):
    """`model` is transformers' Qwen3_5MoeForCausalLM, `mtp` the head."""

    def __init__(self, cfg: Qwen3_5MoeTextConfig) -> None:
        super().__init__()
        self.trunk = qwen.Qwen3_5MoeForCausalLM(cfg)
        self.mtp = MTPHead(cfg)

    @property
    def embedding(self) -> nn.Parameter:
        return self.trunk.model.embed_tokens.weight

    def rotary(self, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin for positions 0..length-1, as the trunk computes them."""
        positions = torch.arange(length, device=self.embedding.device).expand(3, batch, length)
        return self.trunk.model.rotary_emb(self.embedding, positions)

    def hidden(self, tokens: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """tokens [B, L] -> final-norm hidden states [B, L, D]. The trunk's own layers, causal, without padding."""
        states = self.trunk.model.embed_tokens(tokens)
        for layer in self.trunk.model.layers:
            states = layer(states, position_embeddings=rotary, attention_mask=None)
        return self.trunk.model.norm(states)


def build(seed: int, **changes: object) -> TinyHybrid:
    """A freshly initialised model in fp32. Decays start slow (dt log-uniform in [1e-3, 0.1], as Mamba-2 and FLA do)."""
    torch.manual_seed(seed)
    cfg = config(**changes)
    cfg._attn_implementation = "sdpa"
    model = TinyHybrid(cfg)
    small = 0.02 / math.sqrt(2 * cfg.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in model.mtp.named_parameters():
            nn.init.zeros_(parameter) if parameter.ndim == 1 else nn.init.normal_(parameter, std=0.02)
            del name
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")):
                parameter.normal_(std=small)
            elif name.endswith("dt_bias"):
                step = torch.exp(torch.rand_like(parameter) * math.log(100.0) + math.log(1e-3))
                parameter.copy_(step + torch.log(-torch.expm1(-step)))
    return model


def count(model: TinyHybrid) -> dict[str, int]:
    """Parameters of the trunk (tied matrix once) and of the head."""
    return {
        "trunk": sum(p.numel() for p in model.trunk.parameters()),
        "mtp": sum(p.numel() for p in model.mtp.parameters()),
    }
