"""The hybrid in compiled loops: parity with the adapter, and bits that do not depend on anything but a row's tokens."""

from __future__ import annotations

import subprocess
import sys

import mlx.core as mx
import pytest

from labkit.caches import BatchedContiguous, Unsupported, commit
from labkit.models import Rows
from labkit.models.contract import Model
from labkit.models.hybrid.config import NotSpecialised
from labkit.models.hybrid.native import NativeHybrid
from tests.models.hybrid.native_model import native, same_content, whole
from tests.models.hybrid.small import TEXT, config, models, prompt, random_module, tiny_hybrid

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="loops for machines whose device is the CPU")

KINDS = [("sparse", 4), ("sparse", None), ("dense", 8), ("hybrid", None), ("hybrid-moe", None)]
CUTS = (5, 9, 1, 1, 3, 1, 70, 1, 8, 1)


def agree(ours: mx.array, theirs: mx.array) -> None:
    assert mx.abs(ours - theirs).max().item() <= 5e-4
    assert mx.array_equal(mx.argmax(ours, axis=-1), mx.argmax(theirs, axis=-1))


@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_parity_and_the_same_bits_however_the_tokens_are_cut(kind, bits):
    model, adapter = native(kind, bits), models(kind, bits).adapter
    assert isinstance(model, Model)
    tokens = prompt(sum(CUTS), 3)
    logits, caches = whole(model, tokens)
    agree(logits, whole(adapter, tokens)[0])
    cut, position, parts = model.make_caches(), 0, []
    for width in CUTS:
        part = tokens[:, position : position + width]
        parts.append(model(part, cut, Rows.single(position), logits="all").logits)
        position += width
    assert mx.array_equal(mx.concatenate(parts, axis=1), logits)
    assert same_content(cut, caches)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_threads_change_no_bit(kind):
    tokens = prompt(230, 1)
    (one, caches), (three, others) = (whole(native(kind, 4, threads), tokens) for threads in (1, 3))
    assert mx.array_equal(one, three)
    assert same_content(caches, others)


@pytest.mark.parametrize(("group", "bits", "dtype"), [(32, 4, mx.float32), (128, 8, mx.bfloat16), (0, 0, mx.bfloat16)])
def test_other_groups_and_checkpoints_in_bfloat16(group, bits, dtype):
    import mlx.nn as nn

    settings = config(TEXT, num_hidden_layers=2, tie_word_embeddings=True, moe_intermediate_size=128)
    module = random_module(settings, bits=None)
    module.set_dtype(dtype)
    if group:
        nn.quantize(module, group, bits)
    model = NativeHybrid.from_module(module, settings)
    module.set_dtype(mx.float32)
    tokens = prompt(20, 5)
    from labkit.models.adapter import Adapter

    agree(whole(model, tokens)[0], whole(Adapter(module, settings), tokens)[0])


@pytest.mark.parametrize(("padding", "threads"), [("left", 2), ("right", 3)])
def test_neighbours_padding_and_the_thread_that_computes_a_row_change_no_bit(padding, threads):
    model, adapter = native("sparse", 4, threads), models().adapter
    rows = [prompt(n, n)[0].tolist() for n in (4, 9, 23)]
    more = [prompt(n, 50 + n)[0].tolist() for n in (7, 1, 3)]

    def padded(parts: list[list[int]], left: bool = False) -> mx.array:
        pads = [[0] * (max(map(len, parts)) - len(part)) for part in parts]
        return mx.array([pad + part if left else part + pad for pad, part in zip(pads, parts, strict=True)])

    lengths = [len(row) for row in rows]
    if padding == "left":
        pads = [max(lengths) - n for n in lengths]
        first = padded(rows, left=True), Rows.batch([-n for n in pads], left_padding=pads)
    else:
        first = padded(rows), Rows.batch([0, 0, 0], lengths=lengths)
    second = padded(more), Rows.batch(lengths, lengths=[len(part) for part in more])
    now = [a + len(b) for a, b in zip(lengths, more, strict=True)]
    third = prompt(1, 9, batch=3), Rows.batch(now)
    caches, reference = model.make_caches(3), adapter.make_caches(3)
    together = []
    for tokens, where in (first, second, third):
        together.append(model(tokens, caches, where).logits)
        agree(together[-1], adapter(tokens, reference, where).logits)
    for mine, other in zip(caches, reference, strict=True):
        if isinstance(mine, BatchedContiguous):
            assert mine.size() == other.size()
            assert mine.offset.tolist() == other.offset.tolist()
            assert mine.left_padding.tolist() == other.left_padding.tolist()
    for row in range(3):
        alone, position = model.make_caches(), 0
        for step, part in enumerate((rows[row], more[row], third[0][row].tolist())):
            logits = model(mx.array([part]), alone, Rows.single(position)).logits
            assert mx.array_equal(logits[0], together[step][row])
            position += len(part)
        assert same_content([cache.extract(row) for cache in caches], alone)


def test_a_conversation_moves_between_rows_and_graphs():
    """Merge, extend, filter, extract, snapshot, the other graph in between: each row goes on as it would alone."""
    model, adapter = native(), models().adapter
    prompts = [prompt(n, n) for n in (7, 2, 12)]
    whole_rows = [mx.concatenate([p, prompt(6, 70 + i)], axis=1) for i, p in enumerate(prompts)]
    wanted = [whole(model, tokens)[0] for tokens in whole_rows]
    at = [p.shape[1] for p in prompts]

    def step(graph, caches: list, rows: list[int]) -> None:
        tokens = mx.concatenate([whole_rows[row][:, at[row] : at[row] + 1] for row in rows])
        logits = graph(tokens, caches, Rows.batch([at[row] for row in rows])).logits
        for i, row in enumerate(rows):
            agree(logits[i, 0], wanted[row][0, at[row]])
            at[row] += 1

    own = []
    for tokens, graph in zip(prompts, (model, adapter, model), strict=True):
        own.append(model.make_caches())
        graph(tokens, own[-1], Rows.single(), logits=None)
    merged = [type(layer[0]).merge(layer) for layer in zip(*own[:2], strict=True)]
    step(model, merged, [0, 1])
    step(adapter, merged, [0, 1])
    for layer, newcomer in zip(merged, own[2], strict=True):
        layer.extend(newcomer)
    step(model, merged, [0, 1, 2])
    for layer in merged:
        layer.filter([2, 1])
    step(model, merged, [2, 1])
    single = [layer.extract(0) for layer in merged]
    step(model, merged, [2, 1])
    at[2] -= 1
    step(model, [type(cache).restore(cache.snapshot(), cache.layout) for cache in single], [2])


@pytest.mark.parametrize("accepted", [0, 2, 5])
def test_a_draft_is_partly_kept(accepted):
    model = native()
    caches, alone = model.make_caches(), model.make_caches()
    tokens, draft = prompt(6, 1), prompt(5, 2)
    for each in (caches, alone):
        model(tokens, each, Rows.single(), logits=None)
    for cache in caches:
        cache.checkpoint()
    logits = model(draft, caches, Rows.single(6), logits="all").logits
    commit(caches, accepted)
    if accepted:
        kept = model(draft[:, :accepted], alone, Rows.single(6), logits="all").logits
        assert mx.array_equal(kept, logits[:, :accepted])
    assert same_content(caches, alone)


@pytest.mark.parametrize("graph", ["native", "specialised", "adapter"])
def test_a_part_of_padded_input_is_refused_before_any_layer_has_committed(graph):
    """No graph records states under padding. All of it is kept, or none; never other tokens in other layers."""
    model = native() if graph == "native" else models().hybrid if graph == "specialised" else models().adapter
    caches, kept, undone = (model.make_caches(2) for _ in range(3))
    for each in (caches, kept, undone):
        model(prompt(3, 1, batch=2), each, Rows.batch([0, 0]), logits=None)
    for each in (caches, kept):
        for cache in each:
            cache.checkpoint()
        model(prompt(4, 2, batch=2), each, Rows.batch([3, 3], lengths=[4, 2]), logits=None)
    with pytest.raises(Unsupported, match="recorded no states"):
        commit(caches, [1, 2])
    assert same_content(caches, kept)
    commit(kept, [4, 2])
    commit(caches, 4)
    assert same_content(caches, kept)
    for cache in undone:
        cache.checkpoint()
    model(prompt(4, 2, batch=2), undone, Rows.batch([3, 3], lengths=[4, 2]), logits=None)
    with pytest.raises(ValueError, match="-1"):
        commit(undone, -1)
    commit(undone, 0)
    after = model(prompt(1, 3, batch=2), undone, Rows.batch([3, 3])).logits
    fresh = model.make_caches(2)
    model(prompt(3, 1, batch=2), fresh, Rows.batch([0, 0]), logits=None)
    assert mx.allclose(after, model(prompt(1, 3, batch=2), fresh, Rows.batch([3, 3])).logits, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_a_batch_keep_different_parts_of_their_drafts(threads):
    model, kept = native("sparse", 4, threads), [1, 5, 3]
    caches, rows = model.make_caches(3), Rows.batch([6] * 3)
    tokens, draft, after = prompt(6, 1, batch=3), prompt(5, 2, batch=3), prompt(1, 3, batch=3)
    model(tokens, caches, Rows.batch([0] * 3), logits=None)
    for cache in caches:
        cache.checkpoint()
    model(draft, caches, rows, logits=None)
    for cache in caches:
        cache.commit(kept)
    together = model(after, caches, Rows.batch([6 + n for n in kept])).logits
    for row, n in enumerate(kept):
        whole_row = mx.concatenate([tokens[row], draft[row, :n], after[row]])[None]
        assert mx.array_equal(together[row], whole(model, whole_row)[0][0, -1:])


def test_only_what_is_asked_for():
    model = native()
    tokens, rows = prompt(7, 3, batch=2), Rows.batch([0, 0])
    everything = model(tokens, model.make_caches(2), rows, logits="all", hidden=True)
    assert everything.hidden.shape == (2, 7, 128)
    chosen = model(tokens, model.make_caches(2), rows, logits=mx.array([[0, 3], [6, 2]])).logits
    assert mx.array_equal(chosen[1], everything.logits[1][mx.array([6, 2])])
    assert model(tokens, model.make_caches(2), rows, logits=None) == (None, None)
    embedded = model(tokens, model.make_caches(2), rows, logits="all", embeddings=model.embed(tokens))
    assert mx.array_equal(embedded.logits, everything.logits)


def test_the_trained_model_and_its_size():
    from labkit.models.files import weight_files
    from labkit.models.zoo import tiny_hybrid as folder

    both = tiny_hybrid()
    tensors = {name: array for path in weight_files(folder()) for name, array in mx.load(str(path)).items()}
    stored = sum(array.nbytes for name, array in tensors.items() if "mtp." not in name)
    model = NativeHybrid.from_tensors(tensors, both.adapter.config)
    assert model.weights_bytes <= 1.1 * stored
    tokens = prompt(60, 4)
    agree(whole(model, tokens)[0], whole(both.adapter, tokens)[0])


# -- errors and costs --------------------------------------------------------------------------------------------------


def test_bad_input_is_named_and_leaves_the_caches_alone():
    model = native()
    caches = model.make_caches()
    with pytest.raises(ValueError, match="tokens 320 to 320 of a vocabulary of 320"):
        model(mx.array([[320]]), caches, Rows.single())
    with pytest.raises(ValueError, match="lengths"):
        model(prompt(3), caches, Rows.batch([0], lengths=[4]))
    with pytest.raises(ValueError, match="columns"):
        model(prompt(3), caches, Rows.single(), logits=mx.array([[3]]))
    with pytest.raises(ValueError, match="begin at positions"):
        model(prompt(3), caches, Rows.single(4))
    assert all(cache.empty() for cache in caches)
    with pytest.raises(NotSpecialised, match="float32"):
        NativeHybrid.from_tensors({}, config(), mx.bfloat16)
    with pytest.raises(NotSpecialised, match="multiples of 8"):
        NativeHybrid.from_tensors({}, config(TEXT, linear_key_head_dim=36))
    with pytest.raises(ValueError, match="at least one thread"):
        NativeHybrid.from_module(models().module, models().adapter.config, threads=0)


def test_loading_compiles_nothing():
    code = """
import sys, labkit
loaded = labkit.load("tiny-hybrid")
assert type(loaded.model).__name__ == "NativeHybrid", type(loaded.model)
assert "numba" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_auto_takes(tmp_path):
    import labkit
    from labkit.models import LoadError
    from tests.tiny_models import write_checkpoint

    folder = write_checkpoint(tmp_path / "hybrid", "hybrid")
    kinds = {graph: type(labkit.load(folder, graph=graph).model).__name__ for graph in ("auto", "native", "adapter")}
    assert kinds == {"auto": "NativeHybrid", "native": "NativeHybrid", "adapter": "Adapter"}
    assert type(labkit.load(folder, dtype=mx.bfloat16).model).__name__ == "Adapter"
    with pytest.raises(LoadError, match="float32"):
        labkit.load(folder, graph="native", dtype=mx.bfloat16)
    other = write_checkpoint(tmp_path / "llama", "llama")
    assert type(labkit.load(other).model).__name__ == "Adapter"
    with pytest.raises(LoadError, match="no specialised graph"):
        labkit.load(other, graph="native")
