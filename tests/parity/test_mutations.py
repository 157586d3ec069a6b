"""Every deliberate mistake must be called a defect, and leave the model as it was."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.models.adapter import Adapter
from labkit.parity.forms import Form
from labkit.parity.mutations import MUTATIONS, mutation
from labkit.parity.probe import probe_config
from labkit.parity.sides import LabkitSide, MlxLmSide
from labkit.parity.teacher_forcing import teacher_forced

# The narrowest form in which each kind of mistake can show at all
FORMS = {"always": Form(), "caches": Form(chunk=40), "decode": Form.incremental(64)}
LENGTH = 100


def _judge(golden, side):
    return teacher_forced(golden, side, [golden.windows[0][: LENGTH + 1]])


@pytest.fixture(scope="module")
def model(probe_model):
    return probe_model


@pytest.mark.parametrize("mistake", MUTATIONS, ids=lambda item: item.name)
def test_a_mistake_is_called_a_defect_and_mended(goldens, model, mistake):
    golden = goldens["whole"]
    side = MlxLmSide(model, FORMS[mistake.shows])
    with mistake(model):
        report = _judge(golden, side)
    assert report.verdict == "defect"
    # Far beyond the tolerance: not a matter of luck
    assert report.max_logit_difference > 20 * report.tolerance.max_logit_difference
    mended = _judge(golden, side)
    assert mended.agrees, mended.reasons


@pytest.mark.parametrize("mistake", [m for m in MUTATIONS if m.shows != "always"], ids=lambda item: item.name)
def test_why_the_whole_sequence_alone_is_not_enough(goldens, model, mistake):
    """Mistakes in what caches carry cannot show where nothing is carried."""
    with mistake(model):
        assert _judge(goldens["whole"], MlxLmSide(model, Form())).agrees


@pytest.mark.parametrize("name", ["permuted head", "stale conv tail"])
def test_a_mistake_in_labkits_model_is_caught_alike(goldens, probe_folder, name):
    module = MlxLmSide.open(probe_folder, dtype="float32").model
    side = LabkitSide(Adapter(module, probe_config()), Form(chunk=40))
    with mutation(name)(module):
        assert not _judge(goldens["whole"], side).agrees
    assert _judge(goldens["whole"], side).agrees


def test_a_common_shift_of_positions_is_no_mistake(goldens, model):
    """Rotary positions are relative: the limit of what any logits can show, and why "late keys" moves keys alone."""
    import mlx.nn as nn

    class Shifted(nn.Module):
        def __init__(self, rope):
            super().__init__()
            self.rope = rope

        def __call__(self, x, offset=0):
            return self.rope(x, offset=offset + 7)

    attention = [layer.self_attn for layer in model.layers if not layer.is_linear]
    kept = [part.rope for part in attention]
    for part in attention:
        part.rope = Shifted(part.rope)
    try:
        assert _judge(goldens["whole"], MlxLmSide(model)).agrees
    finally:
        for part, rope in zip(attention, kept, strict=True):
            part.rope = rope


def test_an_exception_inside_mends_too(model):
    before = np.array(model.layers[3].self_attn.q_proj.weight)
    with pytest.raises(RuntimeError, match="inside"), mutation("permuted head")(model):
        raise RuntimeError("inside")
    np.testing.assert_array_equal(before, np.array(model.layers[3].self_attn.q_proj.weight))


def test_names_are_unique_and_an_unknown_one_lists_them():
    assert len({item.name for item in MUTATIONS}) == len(MUTATIONS)
    with pytest.raises(KeyError, match="permuted head"):
        mutation("nothing of the kind")


def test_another_architecture_is_refused():
    from mlx_lm.models import llama

    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=1,
        intermediate_size=32,
        num_attention_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=32,
    )
    with (
        pytest.raises(ValueError, match="hybrid of the qwen3_5 family"),
        mutation("permuted head")(llama.Model(arguments)),
    ):
        pass
