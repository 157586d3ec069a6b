"""The `labkit` command: one sub-command a package, composed here and imported when it is asked for."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import click
import typer
from typer.core import TyperGroup

from labkit import __version__, console, devices, doctor
from labkit.console import JsonOption

COMMANDS = {
    "report": "labkit.report.commands:report",
    "generate": "labkit.engine.commands:generate",
    "parity": "labkit.parity.commands:app",
    "kernels": "labkit.kernels.commands:app",
    "bench": "labkit.measure.end_to_end.commands:app",
    "trace": "labkit.measure.trace.commands:app",
    "schedule": "labkit.report.schedule_command:schedule",
    "notebooks": "labkit.report.commands:notebooks_app",
    "book": "labkit.report.commands:book",
}
"""Sub-commands that live in their packages: a function, or a group of commands."""


class _LazyGroup(TyperGroup):
    """Imports a package's commands only when one of them (or the help of all) is asked for: Jupyter, MLX and typer's
    own start-up would otherwise cost every call of `labkit` a second."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _, name = COMMANDS[cmd_name].partition(":")
        found = getattr(importlib.import_module(module), name)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False)
            alone.command(cmd_name)(found)
            found = alone
        command = typer.main.get_command(found)
        command.name = cmd_name
        return command


app = typer.Typer(
    name="labkit",
    cls=_LazyGroup,
    help="Local LLM inference with MLX: a working engine, and a laboratory that takes it apart.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cache_app = typer.Typer(help="The folder of files that labkit can make again: list or clear it.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"labkit {__version__}")
        raise typer.Exit()


@app.callback()
def labkit(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Local LLM inference with MLX: a working engine, and a laboratory that takes it apart."""


@app.command("doctor")
def doctor_command(json: JsonOption = False) -> None:
    """Say what this machine can do, what is missing, and how to get it."""
    findings = doctor.examine()
    rows = [(f.what, f.status, f.detail, f.remedy) for f in findings]
    console.show(
        doctor.as_record(findings),
        as_json=json,
        render=console.table("This machine", ["what", "status", "found", "what to do"], rows),
    )
    if not doctor.healthy(findings):
        console.fail("something that labkit needs is missing or broken (see above)")


PrefixStoreOption = Annotated[Path | None, typer.Option(help="A prefix store's folder instead of the cache.")]


@cache_app.command("list")
def cache_list(prefix_store: PrefixStoreOption = None, json: JsonOption = False) -> None:
    """List what the cache folder holds, by kind; or what a prefix store holds, by model."""
    if prefix_store is not None:
        return _list_prefixes(prefix_store.expanduser(), json)
    root = _cache_root()
    kinds = {folder.name: _measure(folder) for folder in sorted(root.iterdir())} if root.is_dir() else {}
    rows = [(name, files, console.human_bytes(size)) for name, (files, size) in kinds.items()]
    console.show(
        {"folder": str(root), "kinds": {name: {"files": n, "bytes": size} for name, (n, size) in kinds.items()}},
        as_json=json,
        render=console.table(f"{root}", ["kind", "files", "size"], rows),
    )


@cache_app.command("clear")
def cache_clear(
    kind: Annotated[
        str | None, typer.Argument(help="One kind, as `labkit cache list` names it; all by default.")
    ] = None,
    prefix_store: PrefixStoreOption = None,
    json: JsonOption = False,
) -> None:
    """Remove cached files of one kind, or all of them; or everything in a prefix store."""
    if prefix_store is not None:
        if kind is not None:
            console.fail("a prefix store has no kinds: leave out the kind, or --prefix-store", code=2)
        return _clear_prefixes(prefix_store.expanduser(), json)
    root = _cache_root()
    present = sorted(folder.name for folder in root.iterdir() if folder.is_dir()) if root.is_dir() else []
    if kind is not None and kind not in present:
        console.fail(f"the cache holds no kind {kind!r}; it holds: {', '.join(present) or 'nothing'}", code=2)
    removed = {}
    for name in [kind] if kind else present:
        files, size = _measure(root / name)
        if (root / name).is_symlink():
            (root / name).unlink()  # the folder that it leads to is not ours
        else:
            # Other users of the cache may remove files meanwhile: go on with the rest.
            while (root / name).exists():
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(root / name)
        removed[name] = {"files": files, "bytes": size}
    rows = [(name, entry["files"], console.human_bytes(entry["bytes"])) for name, entry in removed.items()]
    console.show(
        {"folder": str(root), "removed": removed},
        as_json=json,
        render=console.table("Removed", ["kind", "files", "size"], rows),
    )


def _cache_root() -> Path:
    root = devices.cache_root()
    if root.exists() and not root.is_dir():
        console.fail(f"{root} is no folder: name one in {devices.CACHE_VARIABLE}", code=2)
    return root


def _list_prefixes(path: Path, json: bool) -> None:
    from labkit.engine.prefix import folder

    try:
        found = folder.summary(path)
    except ValueError as error:
        console.fail(str(error), code=2)
    parts = ("columns", "state", "tail", "private")
    rows = [
        (root, *(entry.get(part, 0) for part in parts), console.human_bytes(entry["bytes"]))
        for root, entry in found.items()
    ]
    console.show(
        {"folder": str(path), "chains": found},
        as_json=json,
        render=console.table(str(path), ["chains", "blocks", "states", "tails", "paused rows", "size"], rows),
    )


def _clear_prefixes(path: Path, json: bool) -> None:
    from labkit.engine.prefix import folder

    try:
        removed = folder.clear(path)
    except ValueError as error:
        console.fail(str(error), code=2)
    console.show(
        {"folder": str(path), "removed": removed},
        as_json=json,
        render=console.table("Removed", ["files", "size"], [(removed["files"], console.human_bytes(removed["bytes"]))]),
    )


def _measure(folder: Path) -> tuple[int, int]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return len(files), sum(path.stat().st_size for path in files if path.exists())


def main() -> None:
    """The console script's entry: whatever ends a command is said in a line, and as JSON where that was asked for."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a narrow locale loses no answer
    console.expect_json("--json" in sys.argv[1:])
    console.show_log()
    try:
        app()
    except SystemExit as end:
        if end.code:
            _answer(_why(end), end.code)
        raise
    except KeyboardInterrupt:
        _answer("interrupted", console.INTERRUPTED)
        sys.exit(console.INTERRUPTED)
    except OSError as error:
        # What the system refuses (a folder, a full disk) is no fault of ours, on any command.
        message = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        _answer(message, 1)
        with contextlib.suppress(OSError):
            console.stderr.print(f"labkit: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except Exception as error:  # a fault of ours: its traceback goes to standard error
        _answer(f"{type(error).__name__}: {error}", 1)
        raise


def _answer(message: str, code: int) -> None:
    """The error as JSON where it was asked for, if standard output still takes anything."""
    try:
        console.show_error(message, code)
        sys.stdout.flush()
    except OSError:
        # What still waits to be written would fail again when the interpreter flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _why(end: SystemExit) -> str:
    """Why typer ended a command that said nothing itself: words that do not parse, or Ctrl-C."""
    refused = end.__context__
    if hasattr(refused, "format_message"):
        return refused.format_message()
    return "interrupted" if end.code == console.INTERRUPTED else f"ended with exit code {end.code}"


if __name__ == "__main__":
    main()
