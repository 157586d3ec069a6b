"""An engine that pauses and resumes one row until it is killed. Run as a script, with the word "forked" or "fresh".

Each line on standard input, `MODE MODEL FOLDER STEP LINES SECONDS PAUSES`, starts one process and is answered by a line
of JSON: the signal that ended it (0: none) and what it had said, line by line. "forked", a process has imported
everything before it begins; "fresh", it begins anew, since Metal does not survive a fork. MODE "plain" runs the request
undisturbed; "pause" pauses and resumes it at every token, and dies in step STEP of its store's work on the disk, in the
middle of it if that is a write, or SECONDS after it has said so many LINES, or once it has said for the PAUSESth time
that it is paused; "resume" takes up what was left, or asks again if nothing was.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

ANSWER, PROMPT, WIDTH = 16, 21, 8


def run(mode: str, model: str, folder: str, step: int, pauses: int, out: int) -> None:
    import labkit
    from labkit.engine import Engine, MemoryGuard, Policy, Request, SamplingParams
    from labkit.engine.memory import FakeMeter
    from labkit.engine.prefix import PrefixStore
    from tests.engine.deadly import Deadly

    say = lambda **words: os.write(out, (json.dumps(words) + "\n").encode())
    loaded = labkit.load(model, graph="adapter")
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True, temperature=0.8, seed=3, repetition_penalty=1.3)
    request = Request([(5 * place) % 256 for place in range(PROMPT)], params, id="r")
    store = PrefixStore(loaded, folder, width=WIDTH, keep_free_bytes=0, system=Deadly(step))
    tight_until, told = 0, []
    size = lambda: 97 if mode == "pause" and meter.readings < tight_until else 1
    meter = FakeMeter(1 << 40, loaded.weights_bytes)
    guard = MemoryGuard(100 * loaded.weights_bytes, meter=meter, interval=0.004)
    meter.live = lambda: size() * loaded.weights_bytes
    engine = Engine(loaded, guard=guard, policy=Policy(patience=0), prefixes=store)

    def on_event(event):
        if event.kind == "token":
            say(token=event.token)
        elif event.kind in ("paused", "resumed"):
            say(kind=event.kind)
            told.append(event.kind)
            if event.kind == "paused" and told.count("paused") == pauses:
                os.kill(os.getpid(), signal.SIGKILL)
        elif event.kind == "finished":
            say(finished=event.reason, cached=event.usage.cached_tokens)
        # Tight after every token, calm some polls after every pause.
        nonlocal tight_until
        if event.kind in ("token", "paused"):
            tight_until = meter.readings + (8 if event.kind == "token" else 60)

    if mode == "resume":
        rows = engine.resume_paused(on_event=on_event)
        say(found=[[row.request.id, *row.answer] for row in rows])
    if engine.idle:
        engine.submit(request, on_event=on_event)
    for _ in engine.run():
        pass
    store.close()


def run_and_end(words: list[str], out: int) -> None:
    """What a line asks for, in a process that ends with it."""
    mode, model, folder, step, pauses = words
    try:
        run(mode, model, folder, int(step), int(pauses), out)
        os._exit(0)
    except BaseException as error:
        os.write(out, (json.dumps({"error": repr(error)}) + "\n").encode())
    finally:
        os._exit(3)


def begun(words: list[str], out: int, *, fresh: bool) -> int:
    """The id of a process that does what a line asks for."""
    if fresh:
        os.set_inheritable(out, True)
        command = [sys.executable, __file__, *words, str(out)]
        return os.posix_spawn(sys.executable, command, os.environ)
    child = os.fork()
    if child == 0:
        run_and_end(words, out)
    return child


def serve(*, fresh: bool) -> None:
    if not fresh:
        import mlx_lm.models.qwen3_5
        import mlx_lm.sample_utils
        import mlx_lm.tokenizer_utils
        import mlx_lm.utils  # noqa: F401

        import labkit.engine.prefix.store  # noqa: F401  # before the forks; no array is made here

    for line in sys.stdin:
        mode, model, folder, step, lines, seconds, pauses = line.split()
        read, written = os.pipe()
        child = begun([mode, model, folder, step, pauses], written, fresh=fresh)
        os.close(written)
        with os.fdopen(read) as said:
            heard = []
            if int(lines):
                # How far it is, not how long it took: a slow machine is killed at the same places.
                heard = [text for text in (said.readline() for _ in range(int(lines))) if text]
                time.sleep(float(seconds))
                os.kill(child, signal.SIGKILL)
            heard += said.read().split("\n")
        _, status = os.waitpid(child, 0)
        ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        print(json.dumps({"signal": ended, "said": [json.loads(text) for text in heard if text]}), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    *words, last = sys.argv[1:]
    if words:
        run_and_end(words, int(last))
    serve(fresh=last == "fresh")
