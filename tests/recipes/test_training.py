"""The one call that trains the model, rehearsed on a CPU: it learns, is killed, goes on, and leaves nothing half
written. Needs torch, which the project does not install: skipped without it.
"""

import signal
import subprocess
import time

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from recipes.tiny_hybrid import checkpoint, parts, train  # noqa: E402 (after the skips)
from recipes.tiny_hybrid import run as course  # noqa: E402
from tests.recipes import trial  # noqa: E402


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trial")
    trial.write_texts(folder)
    found = trial.run(folder, "--steps", "120")
    assert found.returncode == 0, found.stderr
    return folder


def test_one_call_tokenises_trains_and_leaves_what_the_rest_needs(trained):
    record, out = trial.record(trained), trained / "out"
    assert record["curve"][-1][5] < record["curve"][0][5] - 2  # nats of the next token
    assert record["curve"][-1][6] < record["curve"][0][6] - 2  # of the one after it, the MTP head's
    assert record["evals"][-1][2]["all"] < 3
    assert [row[1:3] for row in record["phases"]] == [row[:2] for row in trial.PHASES]
    assert record["curve"][-1][3] < 0.1 * max(row[3] for row in record["curve"])  # the rate's decay was completed
    assert record["kernels"]["milliseconds"] > 0
    assert (out / "corpora.json").exists()
    assert len(list(out.iterdir())) <= 8
    assert set(parts.load_parts(out)) == {name for name, _ in train.trunk.build(0, **trial.SHAPE).named_parameters()}


def test_a_second_call_goes_on_where_the_first_stopped(trained, tmp_path):
    before = trial.record(trained)
    found = trial.run(trained, "--steps", "40")
    assert found.returncode == 0, found.stderr
    after = trial.record(trained)
    assert "scripture:" not in found.stdout  # the token files were still good
    assert after["step"] > before["step"]
    assert after["curve"][: len(before["curve"])] == before["curve"]
    assert after["curve"][len(before["curve"])][5] < before["curve"][0][5] - 1


def test_a_run_may_begin_with_the_weights_of_another(trained, tmp_path):
    trial.write_texts(tmp_path)
    found = trial.run(tmp_path, "--steps", "20", "--start", str(trained / "out"))
    assert found.returncode == 0, found.stderr
    record = trial.record(tmp_path)
    assert record["curve"][0][5] < trial.record(trained)["curve"][0][5] - 2
    assert [one["tokens"] for one in record["earlier"]] == [trial.record(trained)["tokens"]]
    assert record["seed"] == trial.record(trained)["seed"] + 1  # the texts come in another order


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_killed_can_go_on(how, tmp_path):
    """A signal ends it in order; after a kill it goes on from the last checkpoint."""
    trial.write_texts(tmp_path)
    line, environment = trial.command(tmp_path, "--keep-every", "1")
    process = subprocess.Popen(line, env=environment, cwd=trial.CLONE, stdout=subprocess.PIPE, text=True)
    while not process.stdout.readline().startswith("data after"):
        assert process.poll() is None
    while not (tmp_path / "state.pt").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(how)
    assert process.wait(60) == (-signal.SIGKILL if how == signal.SIGKILL else 0)
    begun = trial.record(tmp_path)["step"]
    parts.whole_parts(tmp_path / "out")
    assert begun > 0
    found = trial.run(tmp_path, "--steps", "20")
    assert found.returncode == 0, found.stderr
    assert trial.record(tmp_path)["step"] > begun
    assert trial.record(tmp_path)["evals"]


def test_corpora_that_are_missing_end_the_call_at_once(tmp_path):
    trial.write_texts(tmp_path)
    (tmp_path / "corpora" / "sqlite.txt.xz").unlink()
    found = trial.run(tmp_path)
    assert found.returncode == 1
    assert "lacks sqlite" in found.stderr
    assert not (tmp_path / "state.pt").exists()


def test_a_call_without_time_to_train_changes_nothing(trained):
    """Its deadline has passed when it is ready: what an earlier call left stays."""
    kept = {path.name: path.read_bytes() for path in (trained / "out").iterdir()}
    found = trial.run(trained, seconds=1)
    assert found.returncode == 1
    assert "no time is left" in found.stderr
    assert {path.name: path.read_bytes() for path in (trained / "out").iterdir()} == kept


def small_run(trained) -> course.Run:
    phases = [tuple(phase) for phase in trial.PHASES]
    model, optimiser, steps = train.prepare(trial.SHAPE, torch.device("cpu"), phases)
    run = course.Run(model, optimiser, trained / "tokens", phases, steps)
    run.load_data(20)
    return run


def test_a_loss_that_is_no_number_leaves_the_last_checkpoint(trained, tmp_path):
    run = small_run(trained)
    checkpoint.save(run, tmp_path / "state.pt", tmp_path)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with torch.no_grad():
        run.model.embedding.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        run.train(60, lambda: checkpoint.save(run, tmp_path / "state.pt", tmp_path), 0)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept


def test_a_resumed_run_is_the_run(trained, tmp_path):
    """Two more steps behind a checkpoint are the same two steps, bit for bit, as without one."""
    torch.manual_seed(0)
    straight = small_run(trained)
    step, data = straight.steps[0], straight.data[0]
    for _ in range(2):
        step(data.batch(step.rows), 1e-3)
    checkpoint.save(straight, tmp_path / "state.pt", tmp_path)
    resumed = small_run(trained)
    checkpoint.resume(resumed, tmp_path / "state.pt")
    for run in (straight, resumed):
        for _ in range(2):
            run.steps[0](run.data[0].batch(step.rows), 1e-3)
    assert all(torch.equal(a, b) for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True))


def test_a_state_is_read_without_running_what_it_names(trained):
    """torch reads plain data alone, so everything that a record gets must be plain: its version number is not."""
    saved = torch.load(trained / "state.pt", weights_only=True)
    assert type(saved["record"]["versions"]["torch"]) is str


def test_a_state_of_other_phases_is_refused(trained, tmp_path):
    run = small_run(trained)
    checkpoint.save(run, tmp_path / "state.pt", tmp_path)
    run.data = run.data[:1]
    with pytest.raises(ValueError, match="windows of"):
        checkpoint.resume(run, tmp_path / "state.pt")
