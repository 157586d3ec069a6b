"""`labkit generate`: stream an answer to the terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit import console
from labkit.console import INTERRUPTED, JsonOption

if TYPE_CHECKING:
    from labkit.engine import Engine, Event, Request
    from labkit.engine.prefix import PrefixStore
    from labkit.models import LoadedModel


def generate(
    model: Annotated[str, typer.Argument(help="tiny-hybrid, smollm2-135m, a folder, a .gguf file or a hub id.")],
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the most likely tokens up to this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best one's probability.")] = 0.0,
    repetition_penalty: Annotated[float | None, typer.Option(help="Divides the logits of recent tokens.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the random draws; one is drawn and reported by default.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the text; may be repeated.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None,
    thinking: Annotated[
        bool, typer.Option(help="Whether the model may think first, if its template supports it.")
    ] = True,
    prefix_store: Annotated[
        Path | None,
        typer.Option(help="Folder of a prefix store, which keeps the beginnings of prompts for later ones."),
    ] = None,
    prefix_width: Annotated[
        int | None, typer.Option(help="Tokens of a block in the store; by default 2048 on a GPU and 256 on a CPU.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Stream a model's answer through its chat template. Ctrl-C stops cleanly, with the text so far (exit code 130)."""
    if raw and system:
        console.fail("--system needs the chat template: leave out --raw", code=2)
    if prefix_width is not None and prefix_store is None:
        console.fail("--prefix-width is of a store: name its folder with --prefix-store", code=2)
    try:
        import labkit
        from labkit.engine import RequestFailed

        text = sys.stdin.read() if prompt == "-" else prompt
        params = labkit.SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop=stop or (),
            max_tokens=max_tokens,
        )
        with console.stderr.status(f"loading {model}"):
            loaded = labkit.load(model)
        raw = raw or _without_template(loaded)
        said = [{"role": "system", "content": system}] if system else []
        with _prefixes(loaded, prefix_store, prefix_width) as prefixes:
            engine = labkit.Engine(loaded, prefixes=prefixes)
            chat = text if raw else [*said, {"role": "user", "content": text}]
            request = engine.request(chat, params, thinking=thinking)
            events = _run(engine, request, quiet=json)
    except KeyboardInterrupt:  # first: the imports too may be interrupted
        if json:
            console.show(_record(model, seed=seed, finish_reason="cancelled"), as_json=True, render="")
        raise typer.Exit(INTERRUPTED) from None
    except RequestFailed as error:
        console.fail(str(error))
    except ValueError as error:
        console.fail(str(error), code=2)
    _report(model, events, as_json=json)
    if events[-1].reason == "cancelled":
        raise typer.Exit(INTERRUPTED)


@contextlib.contextmanager
def _prefixes(loaded: LoadedModel, folder: Path | None, width: int | None) -> Iterator[PrefixStore | None]:
    """The store that was asked for; what the answer left in it is on the disk when this ends."""
    if folder is None:
        yield None
        return
    from labkit import devices
    from labkit.caches import Unsupported
    from labkit.engine.prefix import PrefixStore

    if width is None:
        width = 256 if devices.this_device().kind == "cpu" else 2048
    try:
        store = PrefixStore(loaded, folder.expanduser(), width=width)
    except Unsupported as error:
        raise ValueError(f"{loaded.name} does without a prefix store: {error}") from error
    with store:
        yield store
    if error := store.stats()["writer"]["last_error"]:
        console.stderr.print(f"the prefix store could not write everything: {error}", style="yellow")


def _without_template(loaded: LoadedModel) -> bool:
    if loaded.tokenizer.has_chat_template:
        return False
    console.stderr.print(f"{loaded.name} has no chat template: the prompt is continued as it is", style="yellow")
    return True


def _run(engine: Engine, request: Request, *, quiet: bool) -> list[Event]:
    """Run one request, its text going to standard output as it comes. Ctrl-C cancels it; a second one kills."""
    from labkit.engine import RequestFailed

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, previous)
        engine.cancel(request.id)

    engine.submit(request)
    events: list[Event] = []
    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        for event in engine.run():
            events.append(event)
            if event.kind == "error":
                raise RequestFailed(event.error)
            if event.text and not quiet:
                sys.stdout.write(event.text)
                sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone (`| head`), which is no error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit() from None
    finally:
        signal.signal(signal.SIGINT, previous)
    return events


def _record(model: str, **found: Any) -> dict[str, Any]:
    """What --json prints, whatever came of it: the same names each time."""
    return {
        "model": model,
        "text": "",
        "tokens": [],
        "finish_reason": None,
        "stop": None,
        "seed": None,
        "usage": None,
        **found,
    }


def _report(model: str, events: list[Event], *, as_json: bool) -> None:
    last = events[-1]
    text = "".join(event.text for event in events)
    tokens = [event.token for event in events if event.kind == "token"]
    if as_json:
        usage = {**asdict(last.usage), "tokens_per_second": last.usage.tokens_per_second}
        record = _record(
            model, text=text, tokens=tokens, finish_reason=last.reason, stop=last.stop, seed=last.seed, usage=usage
        )
        console.show(record, as_json=True, render="")
        return
    if not text.endswith("\n"):
        sys.stdout.write("\n")
        sys.stdout.flush()
    rate = last.usage.tokens_per_second
    speed = f", {rate:.1f} tok/s" if rate else ""
    wait = last.usage.first_token_seconds
    cached = f" ({last.usage.cached_tokens} of them stored)" if last.usage.cached_tokens else ""
    first = f", first after {wait:.2f} s" if wait is not None else ""
    console.stderr.print(
        f"{last.usage.prompt_tokens}{cached} + {last.usage.completion_tokens} tokens{first}{speed}, "
        f"seed {last.seed}, ended by {last.reason}",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
