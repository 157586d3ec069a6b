"""The process that executes one notebook: `python -m labkit.report.worker`, started by `labkit.report.runner`.

It reads one job as a line of JSON from standard input and writes events as lines of JSON to standard output. Standard
input stays open for as long as the parent lives: when it closes, the parent is gone, and the kernel must go too.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

STATIC_VARIABLE = "LABKIT_STATIC"


class _Events:
    """Where the notebook stands, and the channel to the parent."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self.cell: dict[str, Any] | None = None

    def send(self, event: str, **values: Any) -> None:
        with self._lock:
            self._channel.write(json.dumps({"event": event, **values}) + "\n")
            self._channel.flush()

    def cell_executed(self, cell: Any, cell_index: int, execute_reply: Any) -> None:
        self.send("executed", index=cell_index)

    def cell_started(self, cell: Any, cell_index: int) -> None:
        if cell.cell_type != "code":
            return
        lines = [line for line in cell.source.splitlines() if line.strip()]
        number = self.cell["number"] + 1 if self.cell else 1
        self.cell = {"number": number, "index": cell_index, "line": lines[0][:100] if lines else ""}
        self.send("cell", **self.cell)


def execute(job: dict[str, Any], events: _Events) -> None:
    """Execute the job's notebook; every way to fail ends in one "failed" event that says where."""
    import papermill
    from jupyter_client.kernelspec import NoSuchKernel
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from traitlets.config import Config

    from labkit.report.kernel_client import MessageLost

    def failed(kind: str, message: str, detail: str = "") -> None:
        events.send("failed", kind=kind, message=message, detail=detail, cell=events.cell)

    try:
        papermill.execute_notebook(
            job["source"],
            job["output"],
            parameters=job["parameters"],
            kernel_name="python3",
            progress_bar=False,
            cwd=job["cwd"],
            start_timeout=job["start_timeout"],
            execution_timeout=job["cell_timeout"],
            # The client itself says sooner what is missing.
            iopub_timeout=2 * job["answer_timeout"],
            config=Config(
                {
                    "KernelManager": {
                        # Sockets in a folder, not TCP ports: two kernels that start together may draw the same free
                        # port, and then one waits for answers that go to the other.
                        "transport": "ipc",
                        "ip": job["sockets"],
                        "client_class": "labkit.report.kernel_client.Client",
                    },
                    "Client": {"patience": job["answer_timeout"]},
                }
            ),
            extra_arguments=["--log-level=ERROR"],
            on_cell_start=events.cell_started,
            on_cell_executed=events.cell_executed,
        )
    except papermill.PapermillExecutionError:
        # papermill counts the error of a cell tagged raises-exception too, though it ran all the cells after it.
        error = _unexpected_error(job["output"])
        if error is None:
            events.send("done")
        else:
            failed("cell", f"{error.ename}: {error.evalue}", "\n".join(error.traceback))
    except DeadKernelError:
        failed("dead", "the kernel died (killed, out of memory, or it ended itself)")
    except CellTimeoutError:
        failed("timeout", f"the cell ran longer than {job['cell_timeout']} s")
    except MessageLost as error:
        failed("lost", str(error))
    except NoSuchKernel as error:
        failed("kernel", f"there is no Jupyter kernel named {error.name!r}: install ipykernel for this Python")
    except Exception as error:
        # Before the first cell it is the start that failed, which is worth a second try.
        failed("start" if events.cell is None else "other", f"{type(error).__name__}: {error}")
    else:
        events.send("done")


def _unexpected_error(path: str) -> Any | None:
    """The first error output of an executed notebook outside cells that should raise.

    If there is none, papermill's warning cells are taken out of the file again.
    """
    import nbformat
    from papermill.execute import remove_error_markers

    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        expected = "raises-exception" in cell.metadata.get("tags", ())
        for output in cell.get("outputs", ()):
            if output.output_type == "error" and not expected:
                return output
    nbformat.write(remove_error_markers(notebook), path)
    return None


def _end_with_parent(stream: Any) -> None:
    import psutil

    while stream.read(4096):
        pass
    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(1)


def main() -> None:
    job = json.loads(sys.stdin.buffer.readline())
    # Whatever else prints must not mix with the events.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, args=(sys.stdin.buffer,), daemon=True).start()
    execute(job, _Events(channel))
    channel.flush()
    # The thread above still reads; leaving without it is the point.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
