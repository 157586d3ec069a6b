"""The training code against transformers' own, on a CPU. Needs torch, which the project does not install: skipped
without it.
"""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from recipes.tiny_hybrid import delta, fast, loss, optimiser, parts, trunk  # noqa: E402 (after the skips)
from tests.recipes.trial import SHAPE  # noqa: E402

SMALL = {
    **SHAPE,
    "num_experts": 8,
    "vocab_size": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}


def perturbed(seed: int) -> trunk.TinyHybrid:
    model = trunk.build(seed, **SMALL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def test_fast_layers_match_transformers_in_logits_and_gradients():
    quick, own = perturbed(0), trunk.build(0, **SMALL)
    own.load_state_dict(quick.state_dict())
    fast.install(quick)
    tokens = torch.randint(1, 64, (2, 150))  # transformers does not train the padding row, 0
    logits = quick.hidden(tokens, quick.rotary(2, 150)) @ quick.embedding.T
    expected = own.trunk(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)
    pull = torch.randn_like(expected)
    (logits * pull).sum().backward()
    (expected * pull).sum().backward()
    for (name, ours), theirs in zip(quick.trunk.named_parameters(), own.trunk.parameters(), strict=True):
        error = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
        assert error < 1e-3, (name, error.item())


def recurrence(q, k, v, g, beta):
    """The gated delta rule token by token, in fp64."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    unit = lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    q, k = unit(q).repeat_interleave(2, 2) * q.shape[-1] ** -0.5, unit(k).repeat_interleave(2, 2)
    state, outputs = torch.zeros(*v.shape[:1], v.shape[2], k.shape[-1], v.shape[-1], dtype=torch.float64), []
    for t in range(v.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        error = (v[:, t] - (k[:, t, :, None] @ state).squeeze(-2)) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * error[..., None, :]
        outputs.append((q[:, t, :, None] @ state).squeeze(-2))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("same", [False, True], ids=["random keys", "equal keys, no decay, beta near 1"])
def test_chunk_rule_is_the_recurrence(same):
    """Equal keys make I + A as far from the identity as it gets: powers of A overflow, the inverse must not."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 150, 2, 16), torch.randn(2, 150, 2, 16), torch.randn(2, 150, 4, 16)
    g, beta = -torch.rand(2, 150, 4) * 0.2, torch.rand(2, 150, 4)
    if same:
        k, g, beta = k[:, :1].expand_as(k) + 1e-3 * k, g * 0, 1 - 1e-3 * beta
    leaves = [x.clone().requires_grad_() for x in (q, k, v, g, beta)]
    again = [x.clone().requires_grad_() for x in (q, k, v, g, beta)]
    ours, theirs = delta.chunk_rule(*leaves), recurrence(*again)
    torch.testing.assert_close(ours.double(), theirs, atol=2e-5, rtol=1e-4)
    pull = torch.randn(ours.shape)
    (ours * pull).sum().backward()
    (theirs * pull).sum().backward()
    for a, b in zip(leaves, again, strict=True):
        assert (a.grad - b.grad).norm() < 2e-3 * b.grad.norm().clamp_min(1e-3)


def test_linear_cross_entropy_and_its_gradients():
    torch.manual_seed(0)
    states, weight = torch.randn(3, 20, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    targets = torch.randint(50, (3, 20))
    ours = loss.linear_cross_entropy(states, weight, targets)
    ours.backward()
    ours_grads = states.grad.clone(), weight.grad.clone()
    states.grad = weight.grad = None
    theirs = torch.nn.functional.cross_entropy((states @ weight.T).view(-1, 50), targets.view(-1))
    theirs.backward()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(ours_grads, (states.grad, weight.grad))


def test_orthogonalised_matrices_have_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((3, 16, 48), (2, 48, 16)):
        values = torch.linalg.svdvals(optimiser.orthogonalise(torch.randn(*shape)))
        assert values.min() > 0.5
        assert values.max() < 1.3


def test_optimiser_state_returns_and_weights_stay_views():
    model = trunk.build(0, **SMALL)
    fast.install(model)
    runs = []
    for _ in range(2):
        torch.manual_seed(1)
        model = trunk.build(0, **SMALL)
        fast.install(model)
        mover = optimiser.MuonAdamW(model)
        mover.lr.fill_(1e-3)
        tokens = torch.randint(64, (2, 64))
        for _ in range(2):
            mover.zero_grad()
            hidden = model.hidden(tokens, model.rotary(2, 64))
            (
                loss.linear_cross_entropy(hidden, model.embedding, tokens)
                + model.mtp(hidden, hidden, model.rotary(2, 64)).mean()
            ).backward()
            mover.step()
        runs.append((model, mover))
    (first, saved), (second, _) = runs
    for ours, theirs in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    third = trunk.build(3, **SMALL)
    fresh = optimiser.MuonAdamW(third)
    fresh.load_state_dict(saved.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), third.parameters(), strict=True))


def test_weights_survive_their_parts_and_start_a_new_run(tmp_path):
    model = trunk.build(0, **SMALL)
    paths = parts.save_parts(dict(model.named_parameters()), tmp_path, 7, torch.float32, limit=600_000)
    assert len(paths) > 1
    assert all(path.stat().st_size < 700_000 for path in paths)
    other = trunk.build(1, **SMALL)
    mover = optimiser.MuonAdamW(other)
    mover.load_weights(other, parts.load_parts(tmp_path))
    mover.step()  # with a zero learning rate the masters come back as they are
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(ValueError, match="more than"):
        parts.save_parts(dict(model.named_parameters()), tmp_path, 8, limit=1000)


def test_the_shipped_weights_are_what_mlx_makes_of_them():
    pytest.importorskip("mlx.core")
    from recipes.tiny_hybrid import export_transformers, layout, shipped

    folder = Path(__file__).resolve().parents[2] / "data" / "models" / "tiny-hybrid"
    found = shipped.load_shipped(folder)
    expected = layout.transformers_from_mlx(
        export_transformers.dequantised(folder),
        lambda v: export_transformers.mx.moveaxis(v, 2, 1),
        lambda a, b: export_transformers.mx.concatenate([a, b], axis=-2),
    )
    assert {name.removeprefix("trunk.") for name in found} == set(expected)
    names = {name for name, _ in trunk.build(0).named_parameters()}
    assert set(found) == names
    for name, value in found.items():
        other = torch.from_numpy(np.array(expected[name.removeprefix("trunk.")]))
        torch.testing.assert_close(value, other, rtol=2e-7, atol=1e-8, msg=name)
