"""An engine over pages computes what mlx-lm computes over rectangles: logits and states, bit for bit, on a CPU.

Prompts are computed one by one here: what a packed forward leaves in columns of padding is in mlx-lm's rectangle, and
no page has a place for it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import labkit
from labkit.caches.paged_rows import PagedRows
from labkit.parity.replay import Oracle, Recorder, Schedule, Verdict, run
from labkit.parity.replay import replay as replay_log
from tests.nightly import many
from tests.parity.replaying import crowd, pair, schedules
from tests.tiny_models import write_checkpoint

# Without shrinking: a schedule is short to read, and each replay takes half a second.
LIFE = (Phase.explicit, Phase.reuse, Phase.generate)
quick = settings(deadline=None, max_examples=8, suppress_health_check=list(HealthCheck), phases=LIFE)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> labkit.LoadedModel:
    return labkit.load(write_checkpoint(tmp_path_factory.mktemp("llama"), "llama"))


@pytest.fixture(scope="module")
def models(tokenizer):
    return {
        "llama": pair(tokenizer, "llama"),
        "sliding": pair(tokenizer, "sliding"),
        "hybrid": pair(tokenizer, "hybrid"),
    }


def apart(schedule: Schedule) -> Schedule:
    """Without common beginnings: mlx-lm computes a beginning that was shared off the grid in one more chunk, and a
    chunk of one token turns a ring, which sums in another order."""
    arrivals = (replace(arrival, shared=0, seed=100 + n) for n, arrival in enumerate(schedule.arrivals))
    return replace(schedule, arrivals=tuple(arrivals))


def replayed(loaded, other, schedule, block: int) -> Verdict:
    schedule = replace(schedule, pack=False)
    options = {"prefill_chunk": schedule.chunk, "max_rows": schedule.max_rows, "pack_prompts": False}
    engine, recorder = Recorder.engine(loaded, kv="paged", block_tokens=block, **options)
    run(engine, schedule.arrivals)
    vocabulary = engine.loaded.model.vocab_size
    asked = [arrival.request(number, vocabulary) for number, arrival in enumerate(schedule.arrivals)]
    prompts = {request.id: request.tokens for request in asked}
    assert engine.paged.used == 0
    assert engine.paged.faults() == []
    return replay_log(engine.log, recorder.forwards, Oracle(other, grid=schedule.chunk, prompts=prompts))


@pytest.mark.parametrize("name", ["llama", "sliding", "hybrid"])
@quick
@given(schedule=schedules(), block=st.sampled_from([1, 4, 8, 16]))
def test_random_schedules(models, name, schedule, block):
    assert replayed(*models[name], apart(schedule) if name == "sliding" else schedule, block).faults == []


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["llama", "sliding", "hybrid"])
@settings(quick, max_examples=many(400))
@given(schedule=schedules(), block=st.sampled_from([1, 2, 4, 8, 16, 64]))
def test_random_schedules_by_the_hundred(models, name, schedule, block):
    assert replayed(*models[name], apart(schedule) if name == "sliding" else schedule, block).faults == []


def test_a_planted_fault_is_found(models, monkeypatch):
    """A flush that forgets where a row's tail begins."""
    real = PagedRows.flush

    def off(self):
        real(self)
        self.keys = self.keys * 0.5

    monkeypatch.setattr(PagedRows, "flush", off)
    assert replayed(*models["llama"], crowd(4, answer=12), 4).faults
