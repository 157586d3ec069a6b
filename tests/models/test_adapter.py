"""The adapter against the very module it wraps: same graph, same bits; padding and rows by their solo runs."""

from __future__ import annotations

import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from labkit.caches import Unsupported
from labkit.models import Rows
from labkit.models.contract import Model
from tests.tiny_models import CONFIGS, adapter

NAMES = [name for name in CONFIGS if name != "mamba"]
BATCHING = [name for name in NAMES if name != "capped"]


def prompt(length: int, seed: int = 0, batch: int = 1) -> mx.array:
    return mx.random.randint(0, 250, (batch, length), key=mx.random.key(seed))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_lone_row_is_bit_identical_to_mlx_lm(name):
    model = adapter(name)
    assert isinstance(model, Model)
    caches, theirs = model.make_caches(), make_prompt_cache(model.module)
    position = 0
    for length in (5, 9, 1, 1, 3, 1):
        tokens = prompt(length, position)
        ours = model(tokens, caches, Rows.single(position), logits="all").logits
        assert mx.array_equal(ours, model.module(tokens, cache=theirs)), length
        position += length


@pytest.mark.parametrize("name", NAMES)
def test_only_the_asked_for_positions_go_through_the_head(name):
    model = adapter(name)
    assert model.splits_head
    # Two equally long rows are also what a serial cache takes.
    tokens, rows = prompt(7, 3, batch=2), Rows.batch([0, 0])
    everything = model(tokens, model.make_caches(), rows, logits="all", hidden=True)
    assert everything.logits.shape == (2, 7, model.vocab_size)
    assert everything.hidden.shape[:2] == (2, 7)
    last = model(tokens, model.make_caches(), rows)
    np.testing.assert_allclose(last.logits[:, 0], everything.logits[:, -1], atol=1e-4)
    chosen = model(tokens, model.make_caches(), rows, logits=mx.array([[0, 3], [6, 2]])).logits
    np.testing.assert_allclose(chosen[1, 1], everything.logits[1, 2], atol=1e-4)
    np.testing.assert_allclose(chosen[0, 0], everything.logits[0, 0], atol=1e-4)
    assert model(tokens, model.make_caches(), rows, logits=None) == (None, None)


def test_forwards_of_one_module_in_two_threads_get_the_positions_that_each_asked_for():
    model, tokens = adapter("llama"), prompt(7)
    mx.eval(tokens, model.module.parameters())  # what a thread has built, it alone may evaluate
    begun, other, told = threading.Event(), threading.Event(), []

    def forward(within, **asked) -> np.ndarray:
        caches = model.make_caches()
        make_mask = caches[0].make_mask

        def asked_by_the_trunk(*args, **options):  # the forward has begun, and not come to its end
            within()
            return make_mask(*args, **options)

        caches[0].make_mask = asked_by_the_trunk
        return np.array(model(tokens, caches, Rows.single(), **asked).logits)

    def wait() -> None:
        begun.set()
        assert other.wait(60)

    def whole() -> None:
        told.append(forward(wait, logits="all"))
        mx.clear_streams()

    thread = threading.Thread(target=whole)
    thread.start()
    assert begun.wait(60)

    def let_the_other_end() -> None:
        other.set()
        thread.join()

    last = forward(let_the_other_end, logits="last")
    assert (told[0].shape[1], last.shape[1]) == (7, 1)
    np.testing.assert_allclose(told[0][:, -1:], last, atol=1e-4)


def test_a_model_whose_hidden_states_are_out_of_reach_says_so():
    model = adapter("llama")
    model.splits_head, model._trunk = False, None
    tokens = prompt(4)
    assert model(tokens, model.make_caches(), Rows.single()).logits.shape[1] == 1
    with pytest.raises(ValueError, match="hidden states"):
        model(tokens, model.make_caches(), Rows.single(), hidden=True)


@pytest.mark.parametrize("name", BATCHING)
@pytest.mark.parametrize("chunk", [3, 8])
def test_rows_of_unequal_length_padded_on_the_right_equal_their_solo_runs(name, chunk):
    # mlx-lm PR 1736: pads used to reach recurrent states.
    model = adapter(name)
    rows = [prompt(n, n)[0].tolist() for n in (5, 21)]
    caches = model.make_caches(2)
    solo = [model.make_caches() for _ in rows]
    logits: list[mx.array | None] = [None, None]
    alone: list[mx.array | None] = [None, None]
    done = [0, 0]
    for start in range(0, 21, chunk):
        parts = [row[start : start + chunk] for row in rows]
        width, counts = max(map(len, parts)), [len(part) for part in parts]
        padded = mx.array([part + [0] * (width - len(part)) for part in parts])
        out = model(padded, caches, Rows.batch(done, lengths=counts), logits="last").logits
        for i, part in enumerate(parts):
            if part:
                alone[i] = model(mx.array([part]), solo[i], Rows.single(done[i])).logits
                logits[i] = out[i : i + 1]
                done[i] += len(part)
    for i in (0, 1):
        np.testing.assert_allclose(logits[i], alone[i], atol=2e-4)
    for layer, cache in enumerate(caches):
        if cache.kind == "recurrent":
            for i in (0, 1):
                for ours, own in zip(cache.extract(i).cache, solo[i][layer].cache, strict=True):
                    np.testing.assert_allclose(ours, own, atol=1e-5)
    # One more token for both, now without padding.
    token = mx.array([[7], [9]])
    out = model(token, caches, Rows.batch(done)).logits
    for i in (0, 1):
        np.testing.assert_allclose(
            out[i : i + 1], model(token[i : i + 1], solo[i], Rows.single(done[i])).logits, atol=2e-4
        )


@pytest.mark.parametrize("name", BATCHING)
def test_left_padding_and_merged_rows_equal_solo_runs(name):
    model = adapter(name)
    rows = [prompt(n, n)[0].tolist() for n in (4, 9)]
    solo = []
    for row in rows:
        caches = model.make_caches()
        solo.append((model(mx.array([row]), caches, Rows.single()).logits, caches))
    padded = mx.array([[0] * 5 + rows[0], rows[1]])
    caches = model.make_caches(2)
    out = model(padded, caches, Rows.batch([-5, 0], left_padding=[5, 0])).logits
    merged = [type(layer[0]).merge(layer) for layer in zip(*(caches for _, caches in solo), strict=True)]
    for i in (0, 1):
        np.testing.assert_allclose(out[i : i + 1], solo[i][0], atol=2e-4)
    token = mx.array([[3], [4]])
    after_padding = model(token, caches, Rows.batch([4, 9])).logits
    after_merge = model(token, merged, Rows.batch([4, 9])).logits
    for i in (0, 1):
        alone = model(token[i : i + 1], solo[i][1], Rows.single([4, 9][i])).logits
        np.testing.assert_allclose(after_padding[i : i + 1], alone, atol=2e-4)
        np.testing.assert_allclose(after_merge[i : i + 1], alone, atol=2e-4)


def test_a_lone_row_padded_on_the_right_equals_itself_without():
    for name in NAMES:
        model = adapter(name)
        tokens = prompt(6, 1)
        plain, padded = model.make_caches(), model.make_caches()
        wanted = model(tokens, plain, Rows.single()).logits
        wide = mx.concatenate([tokens, mx.zeros((1, 5), tokens.dtype)], axis=1)
        got = model(wide, padded, Rows.batch([0], lengths=[6])).logits
        np.testing.assert_allclose(got, wanted, atol=2e-4)
        token = mx.array([[5]])
        np.testing.assert_allclose(
            model(token, padded, Rows.single(6)).logits, model(token, plain, Rows.single(6)).logits, atol=2e-4
        )


def test_embeddings_stand_in_for_tokens():
    model = adapter("llama")
    tokens = prompt(5)
    embeddings = model.module.model.embed_tokens(tokens)
    wanted = model(tokens, model.make_caches(), Rows.single()).logits
    got = model(mx.zeros_like(tokens), model.make_caches(), Rows.single(), embeddings=embeddings).logits
    assert mx.array_equal(got, wanted)
    deaf = adapter("capped")
    assert not deaf.accepts_embeddings
    with pytest.raises(ValueError, match="embeddings"):
        deaf(tokens, deaf.make_caches(), Rows.single(), embeddings=embeddings)


@pytest.mark.parametrize("tokens", [None, [[1, 2]], np.array([[1, 2]]), mx.array([[1.0, 2.0]])], ids=repr)
@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_what_are_no_tokens_or_rows_is_refused(name, tokens):
    model = adapter(name)
    with pytest.raises(ValueError, match="of whole numbers"):
        model(tokens, model.make_caches(), Rows.single(0))
    with pytest.raises(ValueError, match=r"rows are labkit\.models\.Rows"):
        model(prompt(2), model.make_caches(), tokens)


def test_rows_that_do_not_fit_are_refused():
    model = adapter("llama")
    caches = model.make_caches()
    model(prompt(3), caches, Rows.single())
    with pytest.raises(ValueError, match=r"positions \[5\].*holds 3"):
        model(prompt(1), caches, Rows.single(5))
    with pytest.raises(ValueError, match="for 2 rows"):
        model(prompt(1), caches, Rows.batch([3, 3]))
    with pytest.raises(ValueError, match="1 caches for a model that keeps 2"):
        model(prompt(1), caches[:1], Rows.single(3))
    with pytest.raises(ValueError, match="block tables"):
        model(prompt(1), caches, Rows(mx.array([3]), block_tables=mx.zeros((1, 1))))
    assert [cache.offset for cache in caches] == [3, 3]


def test_layouts_are_known_before_any_token_and_right():
    for name in NAMES:
        model = adapter(name)
        caches = model.make_caches()
        said = [cache.bytes_for(40, chunk=40) for cache in caches]
        model(prompt(40), caches, Rows.single())
        mx.eval([cache.state for cache in caches])
        assert [cache.nbytes for cache in caches] == said, name


def test_a_model_that_fills_only_mlx_lms_class_keeps_it_and_says_what_it_cannot_do():
    model = adapter("mamba")
    assert model.layer_kinds == ["other", "other"]
    assert model.limits["snapshot"] == ("foreign",)
    assert adapter("hybrid").limits == {"append": ("recurrent",), "trim": ("recurrent",)}
    assert adapter("llama").limits == {}


def test_the_module_stays_usable_by_mlx_lm_itself():
    from mlx.utils import tree_flatten

    model = adapter("hybrid")
    tokens = prompt(6)
    alone = model.module(tokens)
    model(tokens, model.make_caches(), Rows.single())
    assert mx.array_equal(model.module(tokens), alone)
    assert len(tree_flatten(model.module.parameters())) > 10


def test_an_architecture_that_cannot_batch_says_so_when_it_loads():
    # gemma2's attention broadcasts the mask's batch axis over its heads.
    model = adapter("capped")
    assert not model.batches
    assert "gemma2" in model.limits["batch"][0]
    with pytest.raises(Unsupported, match="gemma2"):
        model.make_caches(2)
    assert all(adapter(name).batches for name in BATCHING)
