"""A tiny hybrid of random weights with the real shape's structure: quick to build, quick to run."""

import pytest

from labkit.measure import model_costs
from labkit.models import synthetic

SMALL = {
    "layers": 4,
    "hidden_size": 64,
    "vocab_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


@pytest.fixture(scope="session")
def small():
    return synthetic("qwen3.6-35b-a3b", **SMALL)


@pytest.fixture(scope="module")
def costs():
    return model_costs.of("qwen3.6-35b-a3b")


class Clock:
    """A side that takes the time it is told, and counts how often it is asked."""

    warm_up_tokens = None

    def __init__(self, name, seconds):
        self.name, self.seconds, self.asked = name, seconds, []

    def prefill(self, tokens):
        self.asked.append(("prefill", tokens.size))
        if isinstance(self.seconds, Exception):
            raise self.seconds
        return self.seconds * tokens.size

    def decode(self, filled, steps, warm_up):
        self.asked.append(("decode", filled.context))
        if isinstance(self.seconds, Exception):
            raise self.seconds
        return self.seconds, 7
