"""The client between a worker and its kernel: no wait depends on a wake-up, and a lost message is noticed.

An event loop hears of a ZeroMQ socket's news through a file descriptor, once for each change (it is edge-triggered).
`jupyter_client` sends past the asynchronous socket, and a send that falls between a message's arrival and the loop's
look takes the notice away: the message lies in the socket, and nobody reads it. nbclient sends while it waits, whenever
a cell prints into an Output widget; so now and then it never read the reply of a cell that had run (its issue 312).
"""

from __future__ import annotations

import time
from queue import Empty
from typing import Any

from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.channels import AsyncZMQSocketChannel
from traitlets import Float, Type

LOOK = 0.5  # seconds between two looks into a socket that nobody announces news from


class MessageLost(RuntimeError):
    """A message between client and kernel that should have come long ago, though the kernel lives."""


class _Request:
    """A cell's request, and what has come of it: taken up, ended (on IOPub), answered (on the shell channel)."""

    def __init__(self, id: str, patience: float) -> None:
        self._id, self._patience = id, patience
        self._taken = self._ended = self._answered = False
        self._news = time.monotonic()

    def saw(self, message: dict[str, Any]) -> None:
        """Note what a message says of this request."""
        if message["parent_header"].get("msg_id") != self._id:
            return
        self._taken, self._news = True, time.monotonic()
        if message["msg_type"] == "execute_reply":
            self._answered = True
        elif message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            self._ended = True

    def check(self) -> None:
        """Raise `MessageLost` if a message is missing that needs no computation; a cell may run as long as it likes."""
        if time.monotonic() - self._news < self._patience:
            return
        if not self._taken:
            raise MessageLost("the kernel lives but never took the cell up")
        if self._ended and not self._answered:
            raise MessageLost("the cell has run but its reply never came")
        if self._answered and not self._ended:
            raise MessageLost("the cell has run but its outputs never ended")


class Channel(AsyncZMQSocketChannel):
    """A channel that looks into its socket every `LOOK` seconds, whether or not it was woken."""

    request: _Request | None = None

    async def get_msg(self, timeout: float | None = None) -> dict[str, Any]:  # type: ignore[override]
        """The next message; `queue.Empty` after `timeout` seconds, `MessageLost` if the running request misses one."""
        end = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            try:
                message = await super().get_msg(max(0.0, min(LOOK, end - time.monotonic())))
            except Empty:
                if time.monotonic() >= end:
                    raise
                if self.request:
                    self.request.check()
            else:
                if self.request:
                    self.request.saw(message)
                return message


class Client(AsyncKernelClient):
    """An asynchronous kernel client that survives lost wake-ups and notices lost messages."""

    shell_channel_class = Type(Channel)
    iopub_channel_class = Type(Channel)
    patience = Float(30.0, config=True, help="Seconds without a message that needs no computation before it is lost.")

    def execute(self, *args: Any, **kwargs: Any) -> str:
        """Send a cell's request and watch what comes of it; returns the request's id."""
        id = super().execute(*args, **kwargs)
        self.shell_channel.request = self.iopub_channel.request = _Request(id, self.patience)
        return id
