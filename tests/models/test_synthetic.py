"""Random weights of real shapes: the right storage, the same weights each time, routing as asked for."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from labkit.measure import model_costs
from labkit.models import LoadError, Rows, synthetic
from labkit.models.synthetic import read_shape

SHAPE = "qwen3.6-35b-a3b"
SMALL = {
    "layers": 4,
    "hidden_size": 128,
    "vocab_size": 512,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_attention_heads": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


@pytest.fixture(scope="module")
def model():
    return synthetic(SHAPE, **SMALL)


def parameters(model):
    return dict(tree_flatten(model.module.parameters()))


@pytest.mark.parametrize("bits", [4, 8, None])
def test_stores_what_the_config_counts(bits):
    model = synthetic(SHAPE, bits=bits, **SMALL)
    assert model.weights_bytes == model_costs.of(model.config, dtype="float32").weight_bytes
    assert sum(array.nbytes for array in parameters(model).values()) == model.weights_bytes


@pytest.mark.parametrize(
    "names", [("quantization",), ("quantization_config",), ("quantization", "quantization_config")]
)
def test_whatever_a_config_calls_its_bits_the_asked_for_ones_hold(names):
    """A checkpoint of mlx-lm says them twice, under mlx-lm's name and under transformers'."""
    _, config = read_shape("tiny-hybrid")
    table = config["quantization"]
    config = {key: value for key, value in config.items() if not key.startswith("quantization")}
    config |= dict.fromkeys(names, table)
    for bits, dtypes in ((None, {mx.float32}), (8, {mx.float32, mx.uint32})):
        model = synthetic(config, bits=bits, dtype=mx.float32, **SMALL)
        assert {array.dtype for array in parameters(model).values()} == dtypes


def test_runs_and_stays_finite_over_a_prompt_and_steps(model):
    caches = model.model.make_caches()
    out = model.model(mx.arange(40)[None], caches, Rows.single(0)).logits
    for position in range(40, 44):
        token = mx.argmax(out, axis=-1)
        out = model.model(token, caches, Rows.single(position)).logits
    assert mx.all(mx.isfinite(out)).item()
    assert 0.1 < mx.std(out).item() < 10


def test_different_tokens_give_different_logits(model):
    logits = model.model(mx.arange(64)[None], model.model.make_caches(), Rows.single(0), logits="all").logits[0]
    assert len(set(mx.argmax(logits, axis=-1).tolist())) > 16


def test_same_seed_same_weights_and_another_seed_others(model):
    again, other = synthetic(SHAPE, **SMALL), synthetic(SHAPE, seed=1, **SMALL)
    first = parameters(model)
    assert all(mx.array_equal(first[path], array) for path, array in parameters(again).items())
    assert again.fingerprint == model.fingerprint != other.fingerprint
    changed = [path for path, array in parameters(other).items() if not mx.array_equal(first[path], array)]
    assert sum("switch_mlp" in path for path in changed) == 4 * 3 * 3


def test_leaves_the_global_random_state_alone():
    mx.random.seed(3)
    expected = mx.random.normal((4,))
    mx.random.seed(3)
    synthetic(SHAPE, **SMALL)
    assert mx.array_equal(mx.random.normal((4,)), expected)


def test_codes_use_every_value_and_center_on_zero(model):
    bank = model.module.layers[0].mlp.switch_mlp.down_proj
    values = mx.dequantize(bank.weight, bank.scales, bank.biases, bank.group_size, bank.bits)
    assert abs(mx.mean(values).item()) < 0.01 * mx.std(values).item()
    lengths = mx.linalg.norm(values, axis=-1)
    assert abs(mx.mean(lengths).item() - 1) < 0.05
    codes = {(word >> shift) & 15 for word in bank.weight[0, 0].tolist() for shift in range(0, 32, 4)}
    assert codes == set(range(16))


def expert_loads(model, tokens):
    """For each layer with experts the share of all choices that each expert gets, busiest first."""
    chosen = []
    gates = [layer.mlp for layer in model.module.layers if hasattr(layer.mlp, "switch_mlp")]
    for block in gates:
        block.switch_mlp = _Watch(block.switch_mlp, chosen)
    try:
        ids = mx.random.randint(0, model.model.vocab_size, (1, tokens), key=mx.random.key(1))
        mx.eval(model.module(ids))
    finally:
        for block in gates:
            block.switch_mlp = block.switch_mlp.watched
    loads = []
    for block, indices in zip(gates, chosen, strict=True):
        counts = [0] * block.num_experts
        for index in indices.reshape(-1).tolist():
            counts[index] += 1
        loads.append(sorted((count / indices.size for count in counts), reverse=True))
    return loads


class _Watch:
    """Stands before an expert bank and notes the indices that it is called with."""

    def __init__(self, watched, chosen):
        self.watched, self._chosen = watched, chosen

    def __call__(self, x, indices):
        self._chosen.append(indices)
        return self.watched(x, indices)


def test_skew_makes_routing_uneven(model):
    even = expert_loads(model, tokens=128)
    skewed = expert_loads(synthetic(SHAPE, skew=1.0, **SMALL), tokens=128)
    top = lambda loads: sum(sum(load[:2]) for load in loads) / len(loads)
    assert all(sum(load) == pytest.approx(1) for load in even + skewed)
    assert top(skewed) > 1.15 * top(even)


def test_watching_the_router_changes_nothing(model):
    tokens = mx.arange(8)[None]
    before = model.module(tokens)
    expert_loads(model, tokens=8)
    assert mx.array_equal(model.module(tokens), before)


def test_the_specialised_graph_computes_the_same_from_the_same_weights(model):
    tokens = mx.arange(12)[None]
    expected = model.model(tokens, model.model.make_caches(), Rows.single(0), logits="all").logits
    other = synthetic(SHAPE, graph="specialised", **SMALL).model
    logits = other(tokens, other.make_caches(), Rows.single(0), logits="all").logits
    assert mx.max(mx.abs(logits - expected)).item() < 5e-4


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ("qwen9", {}, "qwen3.6-35b-a3b"),
        (SHAPE, {"layers": 0}, "layers"),
        (SHAPE, {"layers": 3}, "every 4th: layers=3 has none"),
        (SHAPE, {"num_expertz": 4}, "num_experts"),
        ({"model_type": "nonsense"}, {}, "nonsense"),
    ],
)
def test_refuses_what_cannot_be(shape, options, message):
    with pytest.raises(LoadError, match=message):
        synthetic(shape, **options)


def test_layers_count_with_the_interval_that_is_asked_for():
    assert len(synthetic(SHAPE, **SMALL | {"layers": 2, "full_attention_interval": 2}).module.layers) == 2


def test_labkit_s_own_graph_needs_no_layer_of_full_attention():
    model = synthetic(SHAPE, graph="specialised", **SMALL | {"layers": 3}).model
    logits = model(mx.arange(5)[None], model.make_caches(), Rows.single(0), logits="last").logits
    assert mx.isfinite(logits).all().item()


def test_a_shape_too_large_for_the_device_is_refused_before_it_is_drawn():
    with pytest.raises(LoadError, match="GiB are to be had"):
        synthetic(SHAPE, **SMALL | {"num_experts": 40_000_000})
