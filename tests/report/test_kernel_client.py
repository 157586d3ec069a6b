"""The worker's kernel client against a kernel played by the test: lost wake-ups, and messages that never come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from jupyter_client.asynchronous import AsyncKernelClient
from jupyter_client.channels import AsyncZMQSocketChannel
from jupyter_client.session import Session

from labkit.report import kernel_client, worker
from labkit.report.kernel_client import Channel, Client, MessageLost

LONG = 600  # seconds after which a wait has hung


class Kernel:
    """The shell and IOPub sockets of a kernel that says what it is told to."""

    def __init__(self) -> None:
        self.context, self.session = zmq.Context(), Session(key=b"")
        self.shell, self.iopub = self.context.socket(zmq.ROUTER), self.context.socket(zmq.XPUB)
        self.ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (self.shell, self.iopub)]
        self.parent: Any = None
        self.ident: Any = None

    def meet(self, client: AsyncKernelClient) -> None:
        client.start_channels(stdin=False, hb=False, control=False)
        assert self.iopub.poll(LONG * 1000)
        self.iopub.recv()  # the subscription has arrived: nothing that is published from here on is missed

    def take(self) -> None:
        assert self.shell.poll(LONG * 1000)
        self.ident, message = self.session.recv(self.shell, zmq.NOBLOCK)
        self.parent = self.parent or message

    def say(self, what: str) -> None:
        if what == "reply":
            self.session.send(self.shell, "execute_reply", {"status": "ok"}, parent=self.parent, ident=self.ident)
        else:
            self.session.send(self.iopub, "status", {"execution_state": what}, parent=self.parent, ident=b"status")


@pytest.fixture
def kernel():
    played = Kernel()
    yield played
    played.context.destroy(linger=0)


@pytest.fixture
def make_client(kernel: Kernel):
    made: list[AsyncKernelClient] = []

    def make(kind: type[AsyncKernelClient] = Client, **options: Any) -> AsyncKernelClient:
        shell, iopub = kernel.ports
        made.append(kind(shell_port=shell, iopub_port=iopub, session=Session(key=b""), **options))
        kernel.meet(made[-1])
        return made[-1]

    yield make
    for client in made:
        client.shell_channel.close()
        client.iopub_channel.close()
        client.context.destroy(linger=0)


def deaf(channel: AsyncZMQSocketChannel) -> None:
    """From here on nobody tells the loop that the socket has news."""
    channel.socket._handle_events = lambda *_: None


def sends_past_the_loop(channel: AsyncZMQSocketChannel) -> None:
    """What nbclient does while it waits for a reply: the send may take the reply's notice away."""
    time.sleep(0.05)  # the loop has no turn while the reply arrives
    channel.send(channel.session.msg("comm_msg", {}))


@pytest.mark.parametrize("fault", [deaf, sends_past_the_loop])
def test_a_lost_wake_up_does_not_hold_a_reader_up(fault, kernel: Kernel, make_client) -> None:
    async def play() -> dict[str, Any]:
        client = make_client()
        client.execute("x")
        kernel.take()
        kernel.say("busy")
        waiting = asyncio.ensure_future(client.shell_channel.get_msg())
        await asyncio.sleep(0.05)
        if fault is deaf:
            deaf(client.shell_channel)
        kernel.say("reply")
        if fault is sends_past_the_loop:
            sends_past_the_loop(client.shell_channel)
        return await asyncio.wait_for(waiting, LONG)

    assert asyncio.run(play())["msg_type"] == "execute_reply"


def test_that_fault_holds_jupyters_own_client_up(kernel: Kernel, make_client) -> None:
    async def play() -> None:
        client = make_client(AsyncKernelClient)
        client.execute("x")
        kernel.take()
        waiting = asyncio.ensure_future(client.shell_channel.get_msg())
        await asyncio.sleep(0.05)
        deaf(client.shell_channel)
        kernel.say("reply")
        await asyncio.wait_for(waiting, 1)

    with pytest.raises(TimeoutError):
        asyncio.run(play())


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`later(seconds)`: that much time has passed for the client, whose clock stands still otherwise."""
    now = [1000.0]
    monkeypatch.setattr(kernel_client, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


def as_nbclient(client: Client, heard: list[str]) -> Any:
    """The waits of a cell: IOPub to its "idle" and the shell channel to its reply, at once; `heard` gets what came."""

    async def until(channel: Channel, kind: str, state: str | None) -> None:
        while True:
            message = await channel.get_msg()
            heard.append(message["content"].get("execution_state") or "reply")
            if message["msg_type"] == kind and message["content"].get("execution_state") == state:
                return

    return asyncio.wait_for(
        asyncio.gather(
            until(client.shell_channel, "execute_reply", None), until(client.iopub_channel, "status", "idle")
        ),
        LONG,
    )


@pytest.mark.parametrize(
    ("said", "missing"),
    [
        ([], "never took the cell up"),
        (["busy", "idle"], "its reply never came"),
        (["busy", "reply"], "its outputs never ended"),
    ],
    ids=["request", "reply", "idle"],
)
def test_a_message_that_never_comes_is_noticed(said, missing: str, kernel: Kernel, make_client, later) -> None:
    async def play() -> None:
        client = make_client(patience=30.0)
        client.execute("x")
        kernel.take()
        for what in said:
            kernel.say(what)
        waits = asyncio.ensure_future(as_nbclient(client, heard := []))
        while sorted(heard) != sorted(said):
            await asyncio.sleep(0.01)
        assert not waits.done()
        later(31)
        await waits

    with pytest.raises(MessageLost, match=missing):
        asyncio.run(play())


def test_a_cell_may_run_longer_than_the_patience_for_messages(kernel: Kernel, make_client, later) -> None:
    async def play() -> None:
        client = make_client(patience=30.0)
        client.execute("x")
        kernel.take()
        kernel.say("busy")
        waits = asyncio.ensure_future(as_nbclient(client, heard := []))
        while heard != ["busy"]:
            await asyncio.sleep(0.01)
        later(3600)
        await asyncio.sleep(2 * kernel_client.LOOK)  # both channels have looked, and waited on
        assert not waits.done()
        kernel.say("reply")
        kernel.say("idle")
        await waits

    asyncio.run(play())


def test_the_worker_tells_of_a_lost_message_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    import papermill

    def execute_notebook(*_: Any, on_cell_start: Any, **__: Any) -> None:
        on_cell_start(cell=type("Cell", (), {"cell_type": "code", "source": "# what\nx = 1"}), cell_index=3)
        raise MessageLost("the cell has run but its reply never came")

    monkeypatch.setattr(papermill, "execute_notebook", execute_notebook)
    told: list[dict[str, Any]] = []
    events = worker._Events(channel=None)
    events.send = lambda event, **values: told.append({"event": event, **values})
    job = dict.fromkeys(["source", "output", "parameters", "cwd", "sockets", "cell_timeout", "start_timeout"])
    worker.execute(job | {"answer_timeout": 30}, events)
    assert told[-1]["event"] == "failed"
    assert told[-1]["kind"] == "lost"
    assert "reply never came" in told[-1]["message"]
    assert told[-1]["cell"] == {"number": 1, "index": 3, "line": "# what"}
