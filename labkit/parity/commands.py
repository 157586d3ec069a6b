"""`labkit parity`: a model against an oracle, teacher-forced."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click
import typer
from typer.core import TyperGroup

from labkit import console
from labkit.console import JsonOption
from labkit.parity.forms import Form
from labkit.parity.replay.commands import replay

if TYPE_CHECKING:
    from labkit.models import LoadedModel
    from labkit.parity.sides import Side

DEFECT, MISUSE = 1, 2


def parity(
    model: Annotated[str, typer.Argument(help="A name or folder that labkit can load.")],
    against: Annotated[
        str,
        typer.Option(
            help="The oracle: mlx-lm, torch, or a golden (a file, or its name such as tiny-hybrid/torch-whole)."
        ),
    ] = "mlx-lm",
    positions: Annotated[
        int, typer.Option(min=1, help="Tokens to predict; thousands for a verdict on perplexity.")
    ] = 192,
    form: Annotated[
        Literal["whole", "incremental"] | None,
        typer.Option(
            help="The whole sequence at once, or prefill and then single steps. By default whole, or as the golden."
        ),
    ] = None,
    prefill: Annotated[int, typer.Option(min=0, help="Tokens before single steps (incremental).")] = 64,
    window: Annotated[
        int, typer.Option(min=1, help="Positions of a window; each window starts with empty caches.")
    ] = 512,
    text: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="The reference text; without it labkit's held-out texts, or the golden's own.",
        ),
    ] = None,
    candidate: Annotated[Literal["labkit", "mlx-lm"], typer.Option(help="Whose model is judged.")] = "labkit",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Dtype of activations; by default float32 on a CPU and the checkpoint's own on a GPU."),
    ] = None,
    graph: Annotated[
        Literal["auto", "native", "specialised", "adapter"],
        typer.Option(help="Which of labkit's graphs is judged: see `labkit.load`."),
    ] = "auto",
    json: JsonOption = False,
) -> None:
    """Let a model and an oracle predict every token of a text from the same prefix, and judge the difference.

    `labkit parity MODEL` says the same, without "forced".

    Exit code 0: they agree. 1: a defect (the reasons are on standard error). 2: the comparison could not be made.
    """
    from labkit.models import LoadError
    from labkit.parity.goldens import GoldenError
    from labkit.parity.teacher_forcing import teacher_forced
    from labkit.parity.torch_side import TorchUnavailable

    try:
        with _oracle(model, against, form, prefill, dtype, graph) as (loaded, reference):
            own = Form(form or reference.form.kind, prefill if form else reference.form.prefill)
            windows = _windows(loaded, reference, text, positions, window)
            judged = _candidate(loaded, candidate, own, dtype)
            with _progress() as progress:
                report = teacher_forced(
                    reference, judged, windows, model=loaded.name, decode=loaded.tokenizer.decode, progress=progress
                )
    except (LoadError, GoldenError, TorchUnavailable, OSError, ValueError) as error:
        console.fail(str(error), code=MISUSE)
    console.show(report.record(), as_json=json, render=report.tables())
    if not report.agrees:
        console.fail("defect: " + "; ".join(report.reasons), code=DEFECT)


class _Default(TyperGroup):
    """`labkit parity MODEL` is `labkit parity forced MODEL`: what is no sub-command is the model's name."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["forced", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_Default,
    help="Hold a model to an oracle: `labkit parity MODEL` teacher-forced, `labkit parity replay MODEL` batched.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("forced")(parity)
app.command("replay")(replay)


@contextmanager
def _oracle(
    model: str, against: str, form: str | None, prefill: int, dtype: str | None, graph: str
) -> Iterator[tuple[LoadedModel, Side]]:
    """The loaded model and the side it is judged by. A golden or a missing torch is refused before weights are read."""
    import mlx.core as mx

    import labkit
    from labkit.parity.fingerprints import trunk_fingerprint
    from labkit.parity.goldens import open_golden
    from labkit.parity.torch_side import TorchSide, require_torch

    golden = None if against in ("mlx-lm", "torch") else open_golden(against)
    if against == "torch":
        require_torch()
    loaded = labkit.load(model, dtype=getattr(mx, dtype) if dtype else None, graph=graph)
    wanted = Form(form or "whole", prefill)
    if golden is not None:
        golden.require(trunk_fingerprint(loaded.path))
        yield loaded, golden
    elif against == "mlx-lm":
        yield loaded, _mlx_lm(loaded, wanted, dtype)
    else:
        from labkit.parity.transformers_layout import export

        with tempfile.TemporaryDirectory(prefix="labkit-torch-") as scratch:
            yield loaded, TorchSide.open(export(loaded.path, scratch), wanted)


def _mlx_lm(loaded: LoadedModel, form: Form, dtype: str | None) -> Side:
    """mlx-lm's own loading and caches; where two copies of the weights do not fit, on labkit's copy of them."""
    from labkit.devices import this_device
    from labkit.parity.sides import MlxLmSide

    if 2 * loaded.weights_bytes > this_device().working_set_bytes and hasattr(loaded.model, "module"):
        console.stderr.print("two copies of the weights do not fit: both sides read the same ones")
        return MlxLmSide(loaded.model.module, form)
    return MlxLmSide.open(loaded.path, form, dtype=dtype)


def _candidate(loaded: LoadedModel, who: str, form: Form, dtype: str | None) -> Side:
    from labkit.parity.sides import LabkitSide

    return LabkitSide(loaded.model, form) if who == "labkit" else _mlx_lm(loaded, form, dtype)


def _windows(loaded: LoadedModel, reference: Side, text: Path | None, positions: int, length: int) -> list:
    from labkit.parity.goldens import GoldenError, GoldenSide
    from labkit.parity.windows import heldout_texts, windows_across, windows_of

    if isinstance(reference, GoldenSide):
        if text is not None:
            raise GoldenError("a golden speaks only about its own text: leave --text out, or use a live oracle")
        return reference.first(positions)
    if text is not None:
        return windows_of(loaded.tokenizer.encode(_read(text)), positions, length)
    return windows_across(heldout_texts(), loaded.tokenizer.encode, positions, length)


def _read(text: Path) -> str:
    try:
        return text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{text} is no text in UTF-8 ({error.reason} at byte {error.start})") from error


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console.stderr, transient=True) as bar:
        task = bar.add_task("positions", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
