"""Protocol replay of hybrids: recurrent states and attention side by side; the specialised graph within tolerance."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings

import labkit
from labkit.models.hybrid import Hybrid
from labkit.parity.replay import Oracle, Recorder, run, tolerant_replay
from tests.nightly import many
from tests.parity.replaying import crowd, pair, replayed, schedules
from tests.tiny_models import CONFIGS, write_checkpoint

quick = settings(deadline=None, max_examples=80, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> labkit.LoadedModel:
    return labkit.load(write_checkpoint(tmp_path_factory.mktemp("llama"), "llama"))


@pytest.fixture(scope="module")
def hybrid(tokenizer):
    return pair(tokenizer, "hybrid")


@pytest.fixture(scope="module")
def sparse(tokenizer):
    return pair(tokenizer, "hybrid-moe")


@quick
@given(schedule=schedules())
def test_hybrid(hybrid, schedule):
    assert replayed(*hybrid, schedule).faults == []


@settings(quick, max_examples=18)
@given(schedule=schedules())
def test_hybrid_with_experts(sparse, schedule):
    assert replayed(*sparse, schedule).faults == []


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(quick, max_examples=many(1000))
@given(schedule=schedules())
def test_hybrid_a_thousand_times(hybrid, schedule):
    assert replayed(*hybrid, schedule).faults == []


@pytest.mark.parametrize("name", ["hybrid", "hybrid-moe"])
def test_the_specialised_graph_stays_within_its_tolerance_on_the_same_logs(tokenizer, name):
    from dataclasses import replace

    loaded, other = pair(tokenizer, name)
    special = replace(loaded, model=Hybrid.from_module(loaded.model.module, dict(CONFIGS[name]), mx.float32))
    schedule = crowd(6, answer=8)
    engine, recorder = Recorder.engine(special, prefill_chunk=schedule.chunk, max_rows=schedule.max_rows)
    run(engine, schedule.arrivals)
    verdict = tolerant_replay(engine.log, recorder.forwards, Oracle(other, grid=schedule.chunk), 1e-3)
    assert verdict.faults == []
    assert verdict.rows == 6
    assert verdict.vectors > 60


def test_the_command(tmp_path_factory, monkeypatch):
    import json

    from typer.testing import CliRunner

    from labkit.caches import BatchedContiguous
    from labkit.parity.commands import app

    folder = write_checkpoint(tmp_path_factory.mktemp("models") / "hybrid", "hybrid")
    arguments = ["replay", str(folder), "--schedules", "1", "--seed", "3", "--answer", "4", "--json"]
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 0, told.output
    record = json.loads(told.stdout)
    assert record["agrees"]
    assert record["most_rows"] >= 3
    assert CliRunner().invoke(app, ["replay", str(folder / "nothing")]).exit_code == 2
    extend = BatchedContiguous.extend

    def off(self, other):
        extend(self, other)
        self.left_padding = self.left_padding + 1

    monkeypatch.setattr(BatchedContiguous, "extend", off)
    assert CliRunner().invoke(app, arguments).exit_code == 1
