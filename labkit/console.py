"""How every command speaks: results on standard output (a table, or one JSON object), progress on standard error.

Exit codes: 0, done. 1, it ran and the answer is no (a defect, a failed notebook), or the system refused something.
2, it was asked for what cannot be done. 130, Ctrl-C. With `--json` a command that fails prints one object too,
`{"error": {"message": ..., "exit_code": ...}}`, unless its result is there already.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

stderr = Console(stderr=True)

INTERRUPTED = 130  # the shell's code for an end by Ctrl-C

_owes_json = False  # whether the command that runs was asked for a JSON object and has not printed it


def expect_json(asked: bool) -> bool:
    """Note whether standard output is to get a JSON object, whatever comes of the command; gives `asked` back."""
    global _owes_json
    _owes_json = asked
    return asked


JsonOption = Annotated[
    bool, typer.Option("--json", callback=expect_json, help="Print one JSON object instead of a table.")
]


def output_file(*suffixes: str) -> Callable[[Path | None], Path | None]:
    """An option's callback: the file can be written there, which is said before the work and not after it.

    Args:
        suffixes: the kinds of file that it may be, such as ".svg"; any without.
    """

    def check(path: Path | None) -> Path | None:
        if path is None:
            return None
        path = path.expanduser()
        if suffixes and path.suffix not in suffixes:
            raise typer.BadParameter(f"{str(path)!r} must end in {' or '.join(suffixes)}")
        if path.is_dir() or not path.parent.is_dir():
            raise typer.BadParameter(f"{str(path)!r} must be a file in a folder that exists")
        return path

    return check


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> RenderableType:
    """A plain table of `rows` below its title; numbers are right-aligned, None shows as a dash."""
    result = Table()
    rows = [list(row) for row in rows]
    for index, column in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], (int, float, type(None))) for row in rows)
        result.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        # Text, not str: a value such as "mlx[cpu]" is no markup.
        result.add_row(*(Text("-" if value is None else str(value)) for value in row))
    # Not the table's own title: that would be broken at the table's width, a path or a sentence in its middle.
    return Group(Text(title, style="bold"), result)


def show(record: Mapping[str, Any], *, as_json: bool, render: RenderableType | Sequence[RenderableType]) -> None:
    """Print a command's result: `record` as one JSON object, or `render` for people."""
    if as_json:
        expect_json(False)
        # A NaN is not JSON: a reader must get a null rather than a parse error.
        sys.stdout.write(json.dumps(_plain(record), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        sys.stdout.flush()
        return
    piped = not sys.stdout.isatty()
    console = Console(width=160) if piped else Console()
    for part in render if isinstance(render, (list, tuple)) else [render]:
        console.print(part)


def fail(message: str, *, code: int = 1) -> NoReturn:
    """Say on standard error what went wrong and what to do, and end with exit code `code`.

    A command that was to print JSON prints one object all the same: this error, unless its result is there already.
    """
    show_error(message, code)
    stderr.print(f"labkit: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def show_error(message: str, code: int) -> None:
    """The error as a JSON object on standard output, where one was asked for and no other is there."""
    if _owes_json:
        show({"error": {"message": message, "exit_code": code}}, as_json=True, render="")


class _Log(logging.Handler):
    """What is said, on whatever standard error is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)


def show_log() -> None:
    """Let what labkit's own parts say while they work (a compilation that takes long) appear on standard error."""
    log = logging.getLogger("labkit")
    log.setLevel(logging.INFO)
    if not any(isinstance(handler, _Log) for handler in log.handlers):
        log.addHandler(_Log())


def human_bytes(count: int | float) -> str:
    """`count` bytes in binary units, such as "1.5 GiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, (str, int, bool, type(None))):
        return value
    return str(value)
