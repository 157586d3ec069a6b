"""`labkit bench end-to-end | ablations`."""

from __future__ import annotations

import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from labkit import console, devices
from labkit.console import JsonOption

if TYPE_CHECKING:
    from labkit.measure.end_to_end.subject import Subject

app = typer.Typer(
    help="Whole engines side by side, and mechanisms taken away one by one.", no_args_is_help=True, add_completion=False
)

OPPONENTS = ("mlx-lm", "torch")

ModelArgument = Annotated[
    str, typer.Argument(help="What labkit can load, or a shape without weights such as qwen3.6-35b-a3b (random ones).")
]
GraphOption = Annotated[
    Literal["auto", "adapter", "specialised", "native"], typer.Option(help="labkit's graph of the model.")
]
LayersOption = Annotated[int | None, typer.Option(min=1, help="Fewer layers, for a shape without weights.")]
SkewOption = Annotated[float, typer.Option(min=0, help="Uneven routing, for a shape without weights; 1 is strong.")]
SecondsOption = Annotated[
    float | None, typer.Option(min=1, help="Begin no further point after this many seconds; the next run continues.")
]
OutOption = Annotated[
    Path | None, typer.Option(help="Folder of the points measured so far; an interrupted run resumes from it.")
]


@app.command("end-to-end")
def end_to_end(
    model: ModelArgument,
    against: Annotated[str, typer.Option(help="mlx-lm, torch, or both separated by a comma.")] = "mlx-lm",
    graph: GraphOption = "auto",
    prefill: Annotated[str | None, typer.Option(help="Prompt lengths, separated by commas, or 'none'.")] = None,
    decode: Annotated[str | None, typer.Option(help="Contexts, separated by commas, or 'none'.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Three prompts and three contexts, three rounds.")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds in which the sides take turns.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Decode steps of a round.")] = None,
    layers: LayersOption = None,
    skew: SkewOption = 0.0,
    seconds: SecondsOption = None,
    out: OutOption = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure everything again.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(callback=console.output_file(".svg", ".png"), help="File for the plot (.svg or .png)."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time labkit against other engines on the same weights: prompts and decode steps from 256 to 128K tokens."""
    from labkit.measure import floors
    from labkit.measure.end_to_end import LENGTHS, Plan, measure, pictures, sides_for, table
    from labkit.measure.end_to_end.parts import Parts
    from labkit.measure.end_to_end.plan import QUICK, QUICK_DECODE, QUICK_PREFILL
    from labkit.models import LoadError

    opponents = _opponents(against)
    try:
        chosen: dict[str, Any] = dict(QUICK) if quick else {}
        chosen |= {key: value for key, value in (("rounds", rounds), ("steps", steps)) if value is not None}
        plan = Plan.of(
            _lengths(prefill, QUICK_PREFILL if quick else LENGTHS),
            _lengths(decode, QUICK_DECODE if quick else LENGTHS),
            seconds=seconds,
            **chosen,
        )
        subject = _open(model, graph, layers, skew)
        sides = sides_for(subject.module, subject.model, opponents, name=f"labkit, {subject.graph}")
        if "torch" in opponents:
            from labkit.measure.end_to_end.torch_side import TorchSide

            sides.append(TorchSide.open(subject))
        parts = Parts(out, conditions(subject) | plan.measures() | {"sides": [s.name for s in sides]}, fresh=fresh)
        machine = floors.measure(quick=True)
        records = measure(sides, subject.model, plan, costs=subject.costs, floors=machine, parts=parts, progress=_tell)
    except (LoadError, ValueError, RuntimeError) as error:
        console.fail(str(error), code=2)
    fitted = table.curves(records, subject.costs)
    record = conditions(subject) | {
        "date": time.strftime("%Y-%m-%d"),
        "floors": {"read": machine.read.value, "matmul": machine.matmul.value},
        "points": records,
        "missing": [point.name for point in plan.points if parts.load(point.name) is None],
        "curves": {kind: {name: curve.as_record() for name, curve in of.items()} for kind, of in fitted.items()},
    }
    if out is not None:
        parts.store("record", record)
    if plot is not None:
        pictures.speeds(records, subject.name).savefig(plot, bbox_inches="tight")
    console.show(record, as_json=as_json, render=_rendered(subject, records, fitted, machine))
    if record["missing"]:
        console.stderr.print(f"left out by the time limit: {', '.join(record['missing'])}; run the same again")


@app.command("ablations")
def ablations(
    model: ModelArgument,
    only: Annotated[list[str] | None, typer.Option(help="A word of a mechanism's name; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which engine and control take turns.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of a round.")] = 32,
    layers: LayersOption = None,
    skew: SkewOption = 0.0,
    seconds: SecondsOption = None,
    out: OutOption = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure everything again.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Take the specialised graph's mechanisms away one at a time: predicted, then measured, beside what was published.

    The switches act where kernels run, on a GPU; elsewhere this command says so and measures nothing.
    """
    from labkit.kernels.targets import target_in_use
    from labkit.measure import floors
    from labkit.measure.end_to_end import Plan, Point
    from labkit.measure.end_to_end import ablations as mechanisms
    from labkit.measure.end_to_end.parts import Parts
    from labkit.models import LoadError

    if target_in_use() is None:
        console.fail("the switches act where kernels run, and MLX computes on a CPU here: run this on a GPU", code=2)
    chosen = [a for a in mechanisms.ABLATIONS if not only or any(word in a.name for word in only)]
    if not chosen:
        console.fail(
            f"no mechanism has {only} in its name; there are: {', '.join(map(_name, mechanisms.ABLATIONS))}", code=2
        )
    try:
        subject = _open(model, "specialised", layers, skew)
        plan = Plan((Point("decode", 2),), rounds=rounds, steps=steps)
        parts = Parts(out, conditions(subject) | plan.measures(), fresh=fresh)
        machine = mechanisms.Machine.measured(floors.measure(quick=True))
        records = mechanisms.run(
            subject, machine, plan, chosen=chosen, skew=skew, parts=parts, seconds=seconds, progress=_tell
        )
    except (LoadError, ValueError) as error:
        console.fail(str(error), code=2)
    title = f"{subject.name} on {machine.floors.device.name}: what each mechanism's control takes beyond the engine"
    columns, rows = mechanisms.rows(records)
    record = conditions(subject) | {"skew": skew, "wait": machine.wait, "launch": machine.launch, "ablations": records}
    console.show(record, as_json=as_json, render=console.table(title, columns, rows))


def _name(ablation: Any) -> str:
    return ablation.name


def conditions(subject: Subject) -> dict[str, Any]:
    """What a figure depends on: model, weights, graph, device, versions."""
    device = devices.this_device()
    return {
        "model": subject.name,
        "weights": subject.fingerprint[:16],
        "graph": subject.graph,
        "dtype": str(subject.model.dtype).rsplit(".", 1)[-1],
        "device": device.name,
        "versions": {name: found for name in ("labkit", "mlx", "mlx-lm", "torch") if (found := _version(name))},
    }


def _open(model: str, graph: str, layers: int | None, skew: float) -> Subject:
    from labkit.measure.end_to_end.subject import open_subject

    with console.stderr.status(f"loading {model}"):
        return open_subject(model, graph=graph, layers=layers, skew=skew)


def _rendered(subject: Subject, records: list, fitted: dict, machine: Any) -> list[Any]:
    from labkit.measure.end_to_end import table

    where = f"{subject.name} on {machine.device.name}, measured here, medians"
    shown = []
    for kind in ("decode", "prefill"):
        columns, rows = table.rows(records, kind)
        if rows:
            shown.append(console.table(f"{kind}: {where}; floor predicted", columns, rows))
    columns, rows = table.byte_rows(records, subject.costs)
    if rows:
        shown.append(console.table("Caches of one row", columns, rows))
    if fitted:
        columns = ["", "side", "what grows", "share at the longest", "work a second", "largest miss", "growth"]
        shown.append(console.table("Cost curves, fitted", columns, table.curve_rows(fitted)))
    return shown


def _opponents(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or (unknown := [name for name in names if name not in OPPONENTS]):
        console.fail(f"--against takes {', '.join(OPPONENTS)}, not {unknown[0] if names else text!r}", code=2)
    return names


def _lengths(text: str | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """ "256,4K" -> (256, 4096)."""
    if text is None:
        return default
    if text.strip() == "none":
        return ()
    try:
        return tuple(
            int(part[:-1]) * 1024 if part[-1:] in "kK" else int(part) for part in map(str.strip, text.split(","))
        )
    except ValueError:
        raise ValueError(f"lengths are numbers with commas, such as 256,4K,32K; not {text!r}") from None


def _tell(text: str) -> None:
    console.stderr.print(text, markup=False, highlight=False)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
