"""Speculation by bytes: a dense model gains with any acceptance, a sparse one pays for each row's own experts."""

import pytest

from labkit.measure import model_costs
from labkit.measure.speculation import Speculation

SPARSE = model_costs.of("qwen3.6-35b-a3b")


def test_a_round_yields_the_geometric_sum():
    round_ = Speculation(SPARSE, 4096, 3)
    assert round_.tokens(0.0) == 1
    assert round_.tokens(1.0) == 4
    assert round_.tokens(0.5) == pytest.approx(1.875)


def test_verifying_one_row_is_a_step_and_more_rows_cost_more_experts():
    bytes_of = [Speculation(SPARSE, 4096, k).verify_bytes for k in (1, 2, 4)]
    assert Speculation(SPARSE, 4096, 1).step_bytes < bytes_of[0] < bytes_of[1] < bytes_of[2]
    experts = SPARSE.decode_by_part(5)["experts"] / SPARSE.decode_by_part(1)["experts"]
    assert 4 < experts < 5


def test_break_even_is_where_the_gain_is_one():
    round_ = Speculation(SPARSE, 4096, 3, draft=0.05)
    even = round_.break_even()
    assert round_.gain(even) == pytest.approx(1, abs=2e-3)
    assert round_.gain(even - 0.05) < 1 < round_.gain(even + 0.05)


def test_a_dense_model_gains_from_the_first_accepted_token():
    text = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 512}
    dense = model_costs.ModelCosts({"model_type": "llama", "vocab_size": 1000, "num_key_value_heads": 2, **text})
    assert Speculation(dense, 512, 4).break_even() < 0.01
    assert Speculation(dense, 512, 4).gain(1.0) == pytest.approx(5, rel=0.02)


def test_a_draft_as_dear_as_the_model_never_pays():
    assert Speculation(SPARSE, 4096, 4, draft=1.0).break_even() is None


def test_senseless_rounds_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        Speculation(SPARSE, 4096, 0)
    with pytest.raises(ValueError, match="acceptance"):
        Speculation(SPARSE, 4096, 2).tokens(1.5)
