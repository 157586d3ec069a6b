"""A Mac has GNU make 3.81, bash 3.2 and BSD's tools: what the Makefile and the scripts must do without."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CLONE = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (CLONE / "Makefile").exists(), reason="needs a clone")

LATER_MAKE = (
    r"^[^#\t]*(?:::=|!=)|^\.(?:ONESHELL|RECIPEPREFIX|SHELLFLAGS|EXTRA_PREREQS)"
    r"|^\s*(?:undefine|private)\s|\$\((?:file|guile|let|intcmp)\s"
)
LATER_BASH = (
    r"\b(?:mapfile|readarray|coproc)\b|\b(?:declare|local|typeset)\s+-[a-zA-Z]*[Angu]"
    r"|\$\{\w+(?:,,?|\^\^?|@\w)\}|\|&|&>>"
)
BASH_ALONE = r"\[\[|\bsource\b|\bfunction\b|<<<|\bpipefail\b|\blocal\b|^\s*\w+\+="
GNU_TOOLS = (
    r"\bgrep\s+-\w*P|\bsed\s+-\w*[ir]\b|\breadlink\s+-f|\bdate\s+(?:-d|--date)|\bstat\s+-c|\bxargs\s+-\w*[rd]|\bcp\s+--|\bfind\s+-"
    r"|\bmktemp\s+--|\bsort\s+-\w*V|\bhead\s+-n\s*-|\b(?:nproc|timeout\s+\d+|realpath|tac|gensub|sha256sum|md5sum)\b|\bln\s+-\w*r|\btouch\s+-d"
)


def code(path: Path) -> str:
    """A file without its comments and its words to people."""
    lines = [re.sub(r"(?:^|\s)#.*$", "", line) for line in path.read_text().splitlines()]
    return "\n".join(re.sub(r"\b(?:say|die)\s+\"[^\"]*\"", "", line) for line in lines)


def test_the_makefile_is_one_that_make_3_81_reads():
    assert re.findall(LATER_MAKE, code(CLONE / "Makefile"), re.M) == []
    assert re.findall(GNU_TOOLS, code(CLONE / "Makefile"), re.M) == []


@pytest.mark.parametrize("script", sorted((CLONE / "scripts").glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_plain_shell(script):
    assert script.read_text().startswith("#!/bin/sh\n")
    for pattern in (LATER_BASH, BASH_ALONE, GNU_TOOLS):
        assert re.findall(pattern, code(script), re.M) == []
    if dash := shutil.which("dash"):
        assert subprocess.run([dash, "-n", str(script)]).returncode == 0


def test_what_a_mac_runs_by_bash_is_bash_3():
    steps = code(CLONE / ".github" / "workflows" / "test.yml")
    for text in (code(CLONE / ".ci" / "run"), steps):
        assert re.findall(LATER_BASH, text, re.M) == []
    assert re.findall(GNU_TOOLS, steps, re.M) == []


@pytest.mark.parametrize(
    ("pattern", "faults"),
    [
        (LATER_MAKE, ["A ::= b", "A != date", ".ONESHELL:", "undefine A", "x: $(file <y)"]),
        (LATER_BASH, ["mapfile -t a", "declare -A b", "echo ${a,,}", "a |& b"]),
        (BASH_ALONE, ["if [[ a ]]; then", "source x", "read a <<< b"]),
        (GNU_TOOLS, ["grep -oP a", "sed -i s/a/b/ c", "readlink -f .", "stat -c %s a", "xargs -r a", "timeout 5 a"]),
    ],
)  # fmt: skip
def test_each_rule_finds_its_fault(pattern, faults):
    assert [fault for fault in faults if not re.search(pattern, fault, re.M)] == []
