"""The commands `labkit report`, `labkit notebooks` and `labkit book`."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Annotated, Any

import typer

from labkit import console, resources
from labkit.console import JsonOption

notebooks_app = typer.Typer(
    help="The laboratory's notebooks: execute and write back, or check.", no_args_is_help=True, add_completion=False
)

PatternArgument = Annotated[
    str | None,
    typer.Argument(help="Notebook files, or a pattern of their names such as '01' or '*parity*'; all without."),
]
JobsOption = Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Notebooks at a time; cores at most.")]


def report(
    pattern: PatternArgument = None,
    parameter: Annotated[
        list[str] | None, typer.Option("--parameter", "-p", metavar="NAME=VALUE", help="A notebook parameter.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for executed notebooks and the summary.")] = Path("reports"),
    jobs: JobsOption = None,
    quick: Annotated[bool | None, typer.Option("--quick/--full", help="Sets the parameter `quick`.")] = None,
    cell_timeout: Annotated[int, typer.Option(min=1, help="Seconds that one cell may take.")] = 1200,
    json: JsonOption = False,
) -> None:
    """Run notebooks with your parameters and collect their results into one table."""
    from labkit.report import runner, summary
    from labkit.report.parameters import ParameterError, parse_assignments

    notebooks = find_notebooks(pattern)
    try:
        given: dict[str, Any] = parse_assignments(parameter or [])
        if quick is not None:
            if "quick" in given:
                raise ParameterError("give either --quick/--full or -p quick=..., not both")
            given["quick"] = quick
        outcomes = runner.run(notebooks, output, given, jobs=jobs, cell_timeout=cell_timeout, progress=_tell)
    except ValueError as error:
        console.fail(str(error), code=2)
    except KeyboardInterrupt:
        console.fail("interrupted: every notebook was stopped", code=130)
    result = summary.summarise(outcomes, given)
    summary.write(result, output)
    console.show(result, as_json=json, render=_report_tables(result, output))
    _fail_for(outcomes)


@notebooks_app.command()
def refresh(pattern: PatternArgument = None, jobs: JobsOption = None, json: JsonOption = False) -> None:
    """Execute notebooks with their default parameters and write them back with outputs, as they are committed."""
    from labkit.report import normalise

    try:
        outcomes = normalise.refresh(find_notebooks(pattern), jobs=jobs, progress=_tell)
    except ValueError as error:
        console.fail(str(error), code=2)
    except KeyboardInterrupt:
        console.fail("interrupted: no notebook was changed", code=130)
    rows = [(o.notebook.name, "written" if o.passed else "left as it was", round(o.seconds, 1)) for o in outcomes]
    console.show(
        {"notebooks": [dict(zip(("notebook", "state", "seconds"), row, strict=True)) for row in rows]},
        as_json=json,
        render=console.table("Refreshed", ["notebook", "state", "seconds"], rows),
    )
    _fail_for(outcomes)


@notebooks_app.command()
def check(pattern: PatternArgument = None, json: JsonOption = False) -> None:
    """Check that notebooks keep the rules for committed ones, without running them."""
    from labkit.report import guards

    found = {path.name: guards.check(path) for path in find_notebooks(pattern)}
    rows = [(name, problem) for name, problems in found.items() for problem in problems or ["keeps every rule"]]
    console.show(
        {"notebooks": found},
        as_json=json,
        render=console.table("Notebooks", ["notebook", "finding"], rows),
    )
    broken = sum(bool(problems) for problems in found.values())
    if broken:
        console.fail(f"{broken} of {len(found)} notebooks break a rule (see above)")


def book(
    from_: Annotated[
        Path | None, typer.Option("--from", help="A report's folder; without it the notebooks are run first.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of the finished site.")] = Path("book/_build"),
    jobs: JobsOption = None,
    json: JsonOption = False,
) -> None:
    """Build the book from executed notebooks; a failed notebook or a warning fails the build."""
    from labkit.report import book as book_builder

    try:
        built = book_builder.build(output, reports=from_, jobs=jobs, progress=_tell, say=console.stderr.print)
    except book_builder.BookError as error:
        console.fail(str(error))
    except KeyboardInterrupt:
        console.fail("interrupted: the book was not built", code=130)
    record = {"index": str(built.index), "pages": len(built.pages), "notebooks": len(built.notebooks)}
    console.show(
        record,
        as_json=json,
        render=console.table("Book", ["what", "value"], record.items()),
    )


def find_notebooks(pattern: str | None) -> list[Path]:
    """Notebook files by path, or the laboratory's own by a pattern of their names."""
    if pattern and Path(pattern).is_file():
        return [Path(pattern)]
    try:
        known = sorted(resources.notebooks_folder().glob("*.ipynb"))
    except FileNotFoundError as error:
        console.fail(str(error), code=2)
    wanted = [path for path in known if not pattern or _matches(path, pattern)]
    if not wanted:
        names = ", ".join(path.stem for path in known) or "none"
        console.fail(f"no notebook matches {pattern!r}; there are: {names}", code=2)
    return wanted


def _matches(path: Path, pattern: str) -> bool:
    return path.stem.startswith(pattern) or any(fnmatch.fnmatch(name, pattern) for name in (path.name, path.stem))


def _tell(step: Any) -> None:
    name = step.notebook.removesuffix(".ipynb")
    text = {
        "start": f"{name}  started",
        "cell": f"{name}  [{step.cell}/{step.cells}] {step.text[:60]}",
        "retry": f"trying once more: {step.text}",
        "done": f"{name}  done in {step.text}",
        "failed": f"failed: {step.text}",
    }[step.step]
    style = "red" if step.step == "failed" else ""
    console.stderr.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _report_tables(result: dict[str, Any], output: Path) -> list[Any]:
    from labkit.report.records import readable
    from labkit.report.summary import work

    runs = [
        (n["notebook"], "passed" if n["passed"] else "failed", f"{n['seconds']:.1f}", work(n), n["cells"])
        for n in result["notebooks"]
    ]
    records = [
        (one["notebook"].removesuffix(".ipynb"), one["name"], one["basis"], name.replace("_", " "), readable(value))
        for one in result["records"]
        for name, value in one["values"].items()
    ]
    return [
        console.table("Notebooks", ["notebook", "state", "seconds", "work", "cells"], runs),
        console.table("Results", ["notebook", "result", "basis", "what", "value"], records),
        f"Executed notebooks, summary.md and summary.json are in {output}",
    ]


def _fail_for(outcomes: list[Any]) -> None:
    failed = [outcome for outcome in outcomes if not outcome.passed]
    if not failed:
        return
    for outcome in failed:
        if outcome.failure.detail:
            console.stderr.print(outcome.failure.detail, markup=False, highlight=False)
    described = "; ".join(outcome.failure.describe(outcome.notebook.name) for outcome in failed)
    console.fail(f"{len(failed)} of {len(outcomes)} notebooks failed: {described}")
