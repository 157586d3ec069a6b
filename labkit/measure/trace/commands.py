"""`labkit trace decode | cuda-graph`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from labkit import console
from labkit.console import JsonOption

if TYPE_CHECKING:
    from rich.table import Table

    from labkit.measure.model_costs import Traffic
    from labkit.measure.trace.step import StepTrace

app = typer.Typer(help="One step taken apart: launches, stages, bytes.", no_args_is_help=True, add_completion=False)


@app.command()
def decode(
    model: Annotated[str, typer.Argument(help="What labkit can load, or a shape such as qwen3.6-35b-a3b.")],
    graph: Annotated[
        Literal["auto", "adapter", "specialised"],
        typer.Option(help="Whose graph: mlx-lm's, or labkit's where it covers the model."),
    ] = "auto",
    context: Annotated[int, typer.Option(min=1, help="Tokens in the caches.")] = 4096,
    layers: Annotated[int | None, typer.Option(min=1, help="Fewer layers, for a shape without weights.")] = None,
    target: Annotated[
        Literal["metal", "here"],
        typer.Option(help="Count launches as a GPU gets them, or operations as MLX computes them on this machine."),
    ] = "metal",
    persistent: Annotated[
        Literal["off", "experts", "layers"],
        typer.Option(
            help="Launches whose threadgroups wait for each other: for each layer's experts, or whole layers."
        ),
    ] = "off",
    copies: Annotated[bool, typer.Option("--copies", help="Slice updates copy their buffer, as on CUDA.")] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            callback=console.output_file(".svg", ".png"), help="File (.svg or .png) for the graph, stage by stage."
        ),
    ] = None,
    chain: Annotated[bool, typer.Option("--chain", help="Also print the longest chain of dependencies.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Count the launches of one decode step, the stages in which they depend on each other, and the bytes they move.

    Nothing is computed: the graph is counted as it would be launched, on any machine.
    """
    from labkit.measure.end_to_end.subject import open_subject
    from labkit.measure.trace import StepTrace, capture, pictures
    from labkit.measure.trace.step import as_record
    from labkit.models import LoadError
    from labkit.models.hybrid import NotSpecialised, Variants

    try:
        with console.stderr.status(f"loading {model}"):
            try:
                subject = open_subject(model, graph="specialised" if graph == "auto" else graph, layers=layers)
            except NotSpecialised:
                if graph == "specialised":
                    raise
                subject = open_subject(model, graph="adapter", layers=layers)
        traced = subject.model if persistent == "off" else subject.with_variants(Variants(persistent=persistent))
        trace = StepTrace.of(capture(traced, context=context, target=target), subject.costs, copies_updates=copies)
    except (LoadError, ValueError) as error:
        console.fail(str(error), code=2)
    record = {"model": subject.name, "graph": subject.graph, "context": context, "persistent": persistent}
    record |= as_record(trace, subject.costs, context)
    title = f"One decode step of {subject.name}, {subject.graph} graph, {context:,} tokens of context; counted"
    if picture is not None:
        pictures.draw(trace, title).savefig(picture, bbox_inches="tight")
    shown = _tables(trace, subject.costs.decode(context), title, chain=chain)
    console.show(record, as_json=as_json, render=shown)


def _tables(trace: StepTrace, floor: Traffic, title: str, *, chain: bool) -> list[Table]:
    """The step's counts beside its floor, its operations and, on request, its longest chain, for people."""
    whole = [
        ("launches", f"{trace.launch_count:,}"),
        ("stages", f"{trace.stages:,}"),
        ("widest stage", max(trace.widths(), default=0)),
        ("bytes moved", f"{trace.bytes:,}"),
        ("floor: weights once", f"{floor.weights:,.0f}"),
        ("floor: state read and written", f"{floor.state:,.0f}"),
        ("floor: keys and values", f"{floor.kv:,.0f}"),
        ("moved / floor", f"{trace.bytes / floor.bytes:.3f}"),
        ("predicted, H200: launching, us", f"{trace.predicted.host * 1e6:,.0f}"),
        ("predicted, H200: on the device, us", f"{trace.predicted.device * 1e6:,.0f}"),
    ]
    shown = [
        console.table(title, ["", "count"], whole),
        console.table("By operation", ["operation", "launches", "bytes"], trace.by_name()),
    ]
    if chain:
        rows = [(i.stage, i.name, i.label, i.bytes) for i in trace.longest_chain()]
        shown.append(console.table("Longest chain", ["stage", "operation", "parameter", "bytes"], rows))
    return shown


@app.command("cuda-graph")
def cuda_graph(
    file: Annotated[Path, typer.Argument(help="The file that MLX wrote with MLX_SAVE_CUDA_GRAPHS_DOT_FILE set.")],
    as_json: JsonOption = False,
) -> None:
    """Count the launches and stages of the CUDA graphs that MLX recorded while it ran."""
    from labkit.measure.trace.cuda_graph import read_graphs

    try:
        graphs = read_graphs(file)
        counts = [(number, graph.launches, graph.stages) for number, graph in enumerate(graphs)]
    except (OSError, ValueError) as error:
        console.fail(str(error), code=2)
    names: dict[str, int] = {}
    for graph in graphs:
        for name, count in graph.by_name():
            names[name] = names.get(name, 0) + count
    keys = ("graph", "launches", "stages")
    record = {"graphs": [dict(zip(keys, row, strict=True)) for row in counts], "by_name": names}
    shown = [
        console.table("CUDA graphs, in the order in which they were made", keys, counts),
        console.table("By kernel", ["kernel", "launches"], sorted(names.items(), key=lambda item: -item[1])),
    ]
    console.show(record, as_json=as_json, render=shown)
