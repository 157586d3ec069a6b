"""The kernels that exist, with all that their gates need: cases, tolerances, budgets, baselines.

A mechanism's folder registers its kernels in a module `gates.py` with a list `ENTRIES`; nothing else has to be told.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import mlx.core as mx

import labkit.kernels
from labkit.kernels.launch import Kernel
from labkit.kernels.signature import Launch

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
BUDGETS = "budgets.json"


@dataclass(frozen=True)
class Tolerance:
    """How far each element of a float output may be off: |got - want| <= absolute + relative * |want|."""

    absolute: float
    relative: float


DEFAULT_TOLERANCE = {
    mx.float32: Tolerance(1e-5, 1e-5),
    mx.float16: Tolerance(2e-3, 2e-3),
    mx.bfloat16: Tolerance(1.6e-2, 1.6e-2),
}
"""About two units in the last place of values near 1; a kernel states its own where it differs."""


@dataclass(frozen=True)
class Case:
    """One problem for a kernel, small enough for check mode.

    Attributes:
        label: what is particular about it, such as "3 rows of 1000".
        make: the launch for a dtype, on inputs drawn from `mx.random` (seeded anew by the caller at each run).
    """

    label: str
    make: Callable[[mx.Dtype], Launch]


@dataclass(frozen=True)
class Bench:
    """One problem at its real size, and what must move and be computed at least.

    Attributes:
        make: the launch for a dtype.
        baseline: the same by MLX's own operations, where they exist.
        bytes: that a perfect kernel moves with 16-bit activations. operations: floating-point operations it does.
    """

    label: str
    make: Callable[[mx.Dtype], Launch]
    baseline: Callable[[Launch], Sequence[mx.array]] | None = None
    bytes: int = 0
    operations: int = 0


@dataclass(frozen=True)
class Entry:
    """A kernel and its gates.

    Attributes:
        kernel: it. mechanism: its folder's name, filled in by the registry.
        cases: the problems of the gates; the first one's traffic is held to the stored budget.
        summary: one line for `labkit kernels list`.
        dtypes: of the activations, all of which must pass.
        tolerance: for each of them.
        benches: real sizes, for `labkit kernels bench`.
        traffic_slack: the share by which counts may exceed the budget; for counts that depend on random data.
        nightly: the gates are too long for every day: a sibling with the same text has them there.
        read: a launch and its outputs -> what is compared with the reference's, by name, where an output holds several.
    """

    kernel: Kernel
    cases: tuple[Case, ...]
    summary: str
    dtypes: tuple[mx.Dtype, ...] = FLOATS
    tolerance: dict[mx.Dtype, Tolerance] = field(default_factory=lambda: dict(DEFAULT_TOLERANCE))
    benches: tuple[Bench, ...] = ()
    traffic_slack: float = 0.02
    nightly: bool = False
    read: Callable[[Launch, Sequence[mx.array]], dict[str, mx.array]] | None = None
    folder: Path = Path()

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.kernel.name

    @property
    def resident(self) -> bool:
        """Whether all threadgroups must live at once (grid-wide barriers)."""
        return self.kernel.resident

    def parts(self, launch: Launch, outputs: Sequence[mx.array]) -> dict[str, mx.array]:
        """The outputs by name, as they are compared."""
        if self.read is not None:
            return self.read(launch, outputs)
        return dict(zip(self.kernel.text.output_names, outputs, strict=True))

    @property
    def mechanism(self) -> str:
        """The folder it lives in."""
        return self.folder.name

    def budget(self, dtype: mx.Dtype) -> dict[str, int] | None:
        """The stored bounds on the first case's traffic, or None if none are stored."""
        return read_budgets(self.folder).get(self.name, {}).get(dtype_name(dtype))


def dtype_name(dtype: mx.Dtype) -> str:
    """ "float32" for mx.float32."""
    return str(dtype).removeprefix("mlx.core.")


def read_budgets(folder: Path) -> dict[str, dict[str, dict[str, int]]]:
    """{kernel: {dtype: {count: bound}}} of a mechanism's folder."""
    path = folder / BUDGETS
    return json.loads(path.read_text()) if path.exists() else {}


def write_budget(entry: Entry, dtype: mx.Dtype, counts: dict[str, int]) -> None:
    """Store the bounds for a kernel's first case."""
    budgets = read_budgets(entry.folder)
    budgets.setdefault(entry.name, {})[dtype_name(dtype)] = counts
    (entry.folder / BUDGETS).write_text(json.dumps(budgets, indent=2, sort_keys=True) + "\n")


@cache
def all_entries() -> tuple[Entry, ...]:
    """Every registered kernel, by mechanism and name.

    Raises:
        ValueError: two kernels of one name, or one without cases.
    """
    found: list[Entry] = []
    for module in pkgutil.iter_modules(labkit.kernels.__path__):
        folder = Path(labkit.kernels.__path__[0]) / module.name
        if not (folder / "gates.py").exists():
            continue
        gates = importlib.import_module(f"labkit.kernels.{module.name}.gates")
        for entry in gates.ENTRIES:
            object.__setattr__(entry, "folder", folder)
            found.append(entry)
    names = [entry.name for entry in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"kernel names registered twice: {sorted(twice)}")
    for entry in found:
        if not entry.cases:
            raise ValueError(f"kernel {entry.name} registers no cases: nothing would check it")
    return tuple(found)


def find_entries(names: Sequence[str] = ()) -> list[Entry]:
    """The kernels of the given names or mechanisms; all without any.

    Raises:
        ValueError: a name that nothing has; the message lists those that exist.
    """
    entries = list(all_entries())
    if not names:
        return entries
    chosen = [entry for entry in entries if {entry.name, entry.mechanism} & set(names)]
    known = {entry.name for entry in entries} | {entry.mechanism for entry in entries}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no kernel or mechanism {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return chosen
