"""The sanitizer's processes: how tests are dealt out, what counts as found, and what a process that hangs leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from recipes.measured import sanitize

SAID = """========= COMPUTE-SANITIZER
....
========= Invalid __global__ read of size 4 bytes
=========     at custom_kernel_few_rows+0x10
{summary}
"""


# A pytest inside of pytest without what it needs not: its search for lost exceptions collects all garbage many times.
PLAIN = [f"-pno:{plugin}" for plugin in ("cacheprovider", "xdist", "unraisableexception", "threadexception")]


def test_every_test_is_dealt_out_once_and_what_may_hang_comes_last() -> None:
    tests = ["linear_layer-bfloat16", *(f"few_rows-{i}" for i in range(5)), "full_layer-bfloat16"]
    dealt = sanitize.shares(tests, 3)
    assert sorted(test for share in dealt for test in share) == sorted(tests)
    assert [share[-1] for share in dealt] == ["full_layer-bfloat16", "few_rows-4", "linear_layer-bfloat16"]
    assert sanitize.shares(tests[:2], 12) == [["few_rows-0"], ["linear_layer-bfloat16"]]


def test_a_finding_is_any_line_but_the_greeting_and_an_empty_summary() -> None:
    assert sanitize.findings("========= COMPUTE-SANITIZER\n..\n========= ERROR SUMMARY: 0 errors\n") == []
    assert sanitize.findings("================== short test summary info ==================") == []
    assert sanitize.findings("========= 1 failed, 4 passed, 2 skipped, 1 warning in 97.13s (0:01:37) =========") == []
    assert sanitize.findings("..========= Error: Race reported\n.") == ["Error: Race reported"]
    assert sanitize.findings("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)") == []
    assert sanitize.findings(SAID.format(summary="========= ERROR SUMMARY: 2 errors")) == [
        "Invalid __global__ read of size 4 bytes",
        "at custom_kernel_few_rows+0x10",
        "ERROR SUMMARY: 2 errors",
    ]


LOST = "========= Internal Sanitizer Error: Detected a failure to track a kernel launch."


def test_what_ran_after_the_sanitizer_lost_track_is_untracked() -> None:
    tests = [f"gates.py::test_cuda[{name}]" for name in ("few_rows", "few_rows_tensor", "argmax", "full_layer")]
    log = f"{tests[0]} PASSED [ 25%]\n{tests[1]} {LOST}\n=========\nPASSED [ 50%]\n{tests[2]} "
    assert sanitize.untracked(log, tests) == {tests[1], tests[2]}
    assert sanitize.untracked(f"{LOST}\n{tests[0]} PASSED\n", tests) == {tests[0]}
    assert sanitize.untracked(log.replace(LOST, ""), tests) == set()


def test_a_test_that_passed_untracked_is_no_pass(tmp_path) -> None:
    """Stands for the sanitizer: of two tests that pass it loses track in the second, and counts that as a hazard."""
    script = tmp_path / "sanitizer.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "listed = pathlib.Path(sys.argv[sys.argv.index('--job') + 1])\n"
        "one, two = json.loads(listed.read_text())\n"
        f"print('========= COMPUTE-SANITIZER', one + ' PASSED', two + ' {LOST}', 'PASSED', sep='\\n')\n"
        "print('========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)')\n"
        "rows = [json.dumps({'test': test, 'outcome': 'passed'}) for test in (one, two)]\n"
        "listed.with_suffix('.jsonl').write_text('\\n'.join(rows))\n"
    )
    ran = sanitize.run([sys.executable, str(script)], "racecheck", ["a::b", "a::c"], 1, seconds=600)
    assert [row["outcome"] for row in ran["rows"]] == ["passed", "untracked"]
    assert "summary" not in ran["rows"][0]
    assert ran["findings"] == [
        "a::c: Internal Sanitizer Error: Detected a failure to track a kernel launch.",
        "RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)",
    ]
    assert len(ran["logs"]) == 1


def test_what_a_process_did_before_it_died_counts(tmp_path) -> None:
    """Stands for the sanitizer: one test passes, then a finding, then nothing more."""
    script = tmp_path / "sanitizer.py"
    script.write_text(
        "import json, pathlib, sys\n"
        "listed = pathlib.Path(sys.argv[sys.argv.index('--job') + 1])\n"
        "first = json.loads(listed.read_text())[0]\n"
        "print('========= COMPUTE-SANITIZER'); print('========= Race reported', flush=True)\n"
        "listed.with_suffix('.jsonl').write_text(json.dumps({'test': first, 'outcome': 'passed'}) + '\\n')\n"
    )
    ran = sanitize.run([sys.executable, str(script)], "racecheck", ["a", "b", "c"], 2, seconds=600)
    assert [(row["test"], row["outcome"]) for row in ran["rows"]] == [
        *[("a", "passed"), ("b", "passed"), ("c", "not reached")]
    ]
    assert ran["findings"] == ["Race reported"] * 2
    assert [row.get("summary") for row in ran["rows"]] == [False, False, None]


def test_no_test_begins_after_its_time_so_that_the_process_ends_by_itself(tmp_path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("import pytest\npytestmark = pytest.mark.cuda\ndef test_a(): pass\ndef test_b(): pass\n")
    for until, expected in ((0, ["a"]), (float("inf"), ["a", "b"])):
        plugin = sanitize.Outcomes(tmp_path / f"{until}.jsonl", until)
        pytest.main(["-q", *PLAIN, "-m", "cuda", str(file)], [plugin])
        rows = (tmp_path / f"{until}.jsonl").read_text().splitlines()
        assert [json.loads(row)["test"].rpartition("_")[2] for row in rows] == expected


def test_a_process_that_hangs_is_ended_at_the_deadline() -> None:
    hangs = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    sanitize._finish(hangs, time.perf_counter() - 1)
    assert hangs.returncode == -signal.SIGKILL
