"""An engine's parts, made from its options and fitted together. Each knows the parts below it, and none the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.caches import PagedKV
from labkit.engine.admission import Admission
from labkit.engine.capacity import Budget
from labkit.engine.delivery import Delivery
from labkit.engine.executor import Executor, cannot_batch
from labkit.engine.hooks import PrefixStore
from labkit.engine.journal import Journal
from labkit.engine.memory import Estimates, MemoryGuard
from labkit.engine.paging import PagedAdmission, Paging, PlainStates
from labkit.engine.parking import Ledger, Parking, Policy
from labkit.engine.register import Register
from labkit.engine.scheduler import Scheduler
from labkit.engine.session import Session, engine_clock
from labkit.kernels.recording import Machine, machine_here
from labkit.models import LoadedModel


@dataclass(frozen=True)
class Parts:
    """What an engine consists of.

    Attributes:
        clock: seconds since it was made.
        admission: who may start.
        scheduler: what is done next.
        executor: does it, and owns every array.
        journal: what was done.
        register: who is here.
        delivery: events on their way.
        parking: who is put aside, with a guard.
        paged: the pools, for "paged".
    """

    clock: Callable[[], float]
    admission: Admission
    scheduler: Scheduler
    executor: Executor
    journal: Journal
    register: Register
    delivery: Delivery
    parking: Parking | None
    paged: PagedKV | None


def assemble(
    loaded: LoadedModel,
    *,
    prefill_chunk: int | None,
    capacity_bytes: int | None,
    max_rows: int,
    pack_prompts: bool,
    prefixes: PrefixStore | None,
    guard: MemoryGuard | None,
    policy: Policy | None,
    kv: str,
    block_tokens: int | None,
    pool_bytes: int | None,
    log_limit: int,
    replay: bool | Machine,
) -> Parts:
    """The parts of an `Engine` of these options.

    Raises:
        ValueError: options that are none, or do not go together.
    """
    _check_kinds(loaded, prefixes, guard, policy)
    _check_counts(
        prefill_chunk=prefill_chunk,
        capacity_bytes=capacity_bytes,
        max_rows=max_rows,
        block_tokens=block_tokens,
        pool_bytes=pool_bytes,
        log_limit=log_limit,
    )
    _check_kv(kv, block_tokens, pool_bytes)
    if prefixes is not None and prefill_chunk not in (None, prefixes.grid):
        raise ValueError(f"prefill_chunk {prefill_chunk} is not the store's grid of {prefixes.grid}: leave it out")
    chunk = prefixes.grid if prefixes is not None else prefill_chunk or 2048
    clock, journal, paging = engine_clock(), Journal(log_limit), None
    budget, estimates = _sizes(loaded, capacity_bytes, guard, chunk)
    if kv == "paged":
        pool = {"block_tokens": block_tokens, "pool_bytes": pool_bytes}
        paging = Paging(loaded, budget, **pool, max_rows=max_rows, grid=chunk)
        admission = PagedAdmission(paging, budget, chunk=chunk, max_rows=max_rows)
        prefixes = None if prefixes is None else PlainStates(prefixes)
    else:
        admission = Admission(budget, chunk=chunk, max_rows=max_rows, rectangle=cannot_batch(loaded) is None)
    machine = (machine_here() if replay else None) if isinstance(replay, bool) else replay
    executor = Executor(
        loaded,
        grid=chunk,
        pack=pack_prompts,
        clock=clock,
        prefixes=prefixes,
        paging=paging,
        machine=machine,
        room=_room(admission, guard),
    )
    ledger = None if guard is None else Ledger(policy)
    register = Register(executor, journal, ledger=ledger, store=prefixes)
    delivery, parking = Delivery(register), None
    if guard is not None:
        parking = Parking(
            executor,
            admission,
            estimates,
            guard,
            ledger=ledger,
            store=prefixes,
            chunk=chunk,
            sessions=register.live,
            tell=delivery.tell,
        )
    paged = None if paging is None else paging.kv
    return Parts(clock, admission, Scheduler(chunk), executor, journal, register, delivery, parking, paged)


def _room(admission: Admission, guard: MemoryGuard | None) -> Callable[[list[Session], int], int]:
    """What a recording may take: what those who started will never need; with a guard, what keeps everybody calm."""
    if guard is not None:
        return lambda live, held: guard.calm_bytes() + held
    return lambda live, held: admission.left([session.total for session in live])


def _check_kinds(loaded: Any, prefixes: Any, guard: Any, policy: Any) -> None:
    if not isinstance(loaded, LoadedModel):
        raise ValueError(f"an engine takes a loaded model, labkit.load(...), not {loaded!r}")
    for name, value, kind in (("guard", guard, MemoryGuard), ("policy", policy, Policy)):
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} must be a {kind.__name__}, not {value!r}")
    if prefixes is not None and not hasattr(prefixes, "grid"):
        raise ValueError(f"prefixes must be a labkit.engine.prefix.PrefixStore, not {prefixes!r}")
    if policy is not None and guard is None:
        raise ValueError("a policy for memory pressure needs a guard that notices it: give guard=MemoryGuard()")


def _check_kv(kv: str, block_tokens: int | None, pool_bytes: int | None) -> None:
    if kv not in ("contiguous", "paged"):
        raise ValueError(f'kv is "contiguous" or "paged", not {kv!r}')
    if kv == "contiguous" and (block_tokens or pool_bytes):
        raise ValueError('block_tokens and pool_bytes belong to kv="paged"')


def _check_counts(**counts: Any) -> None:
    for name, count in counts.items():
        if count is not None and (type(count) is not int or count < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, not {count!r}")


def _sizes(
    loaded: LoadedModel, capacity_bytes: int | None, guard: MemoryGuard | None, chunk: int
) -> tuple[Budget, Estimates]:
    """What there is and what is needed; with a guard, up to its hard line and with what a step takes besides."""
    budget = Budget(loaded, capacity_bytes)
    estimates = Estimates(loaded, budget)
    if guard is None:
        return budget, estimates
    guard.begin(loaded.weights_bytes)
    limit = min(guard.capacity_bytes, budget.capacity.capacity_bytes)
    budget = Budget(loaded, limit, transient=lambda prompt: estimates.prompt_step(prompt, chunk))
    if budget.capacity.max_context_tokens < 1:
        raise ValueError(
            f"the guard's ceiling of {guard.ceiling_bytes} bytes leaves {limit} below its hard line, and the "
            f"weights take {loaded.weights_bytes}: raise it"
        )
    return budget, estimates
