"""The counts of the gated delta rule against what the simulator sees its kernels do."""

from __future__ import annotations

import mlx.core as mx
import pytest

from labkit.kernels import simulator
from labkit.kernels.gated_delta.chunks import PREPARE, prepare_call
from labkit.kernels.gated_delta.counts import DeltaCounts
from labkit.kernels.gated_delta.gates import scan_inputs
from labkit.kernels.gated_delta.recurrence import SCAN, SCAN_BLOCKED, scan_blocked_call, scan_call
from labkit.kernels.gated_delta.shapes import RuleInputs

SIZES = (1, 37, 1, 2, 32, 32)
COUNTS = DeltaCounts(*SIZES[1:], itemsize=4)


def _bytes(kernel, call) -> dict[tuple[str, str], int]:
    run = simulator.run(kernel.text, kernel.launch(**call), check=True).raise_for_faults()
    return {(flow.memory, flow.direction): flow.bytes for flow in run.traffic.buffers}


@pytest.fixture(scope="module")
def inputs() -> RuleInputs:
    mx.random.seed(0)
    return RuleInputs.checked(*scan_inputs(*SIZES, mx.float32))


def test_the_scan_moves_the_state_twice(inputs) -> None:
    moved = _bytes(SCAN, scan_call(inputs))
    assert moved["state", "read"] + moved["state_out", "write"] == COUNTS.scan_state_bytes
    assert ("state_out", "read") not in moved


@pytest.mark.parametrize("tokens", [8, 32])
def test_the_blocked_scan_moves_it_for_each_block(inputs, tokens: int) -> None:
    moved = _bytes(SCAN_BLOCKED, scan_blocked_call(inputs, tokens))
    state = sum(size for (memory, _), size in moved.items() if memory.startswith("state"))
    assert state == COUNTS.blocked_state_bytes(tokens)


def test_the_chunked_form_hands_on_what_it_prepared(inputs) -> None:
    moved = _bytes(PREPARE, prepare_call(inputs))
    assert sum(size for (_, way), size in moved.items() if way == "write") == COUNTS.prepared_bytes()


def test_the_published_traffic_of_a_blocked_scan() -> None:
    """256 MiB a layer at 2,048 tokens: the state of 2 MiB, in and out for each of 64 blocks."""
    counts = DeltaCounts(2048)
    assert counts.blocked_state_bytes() - 2 * counts.state_bytes == 256 << 20
    assert counts.chunked_operations() > counts.scan_operations


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the key heads"):
        DeltaCounts(8, hk=3, hv=4)
