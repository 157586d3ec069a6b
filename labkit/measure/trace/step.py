"""A captured step as the device sees it: launches, the stages in which they wait for each other, bytes moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Any

from labkit.kernels.persistent.prediction import Prediction, barriers_in, predict
from labkit.measure.model_costs import ModelCosts
from labkit.measure.trace.capture import Captured, Operation, Value

VIEWS = frozenset(
    {
        *("AsStrided", "Broadcast", "BroadcastAxes", "Copy", "Depends", "ExpandDims", "Flatten", "Reshape"),
        *("Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View"),
    }
)
"""Operations that only look at memory in another way. (A reshape of what is not contiguous copies; decode has none.)"""


@dataclass(frozen=True)
class Launch:
    """One operation that the device is given.

    Attributes:
        name: MLX's, or the kernel's own. count: of launches (`_count`).
        stage: 1 for what waits for no launch; else one more than the latest launch that it reads from.
        reads, writes: bytes. weights: of the bytes read, those of parameters.
        label: the parameter that it multiplies by, or "". layer: None outside the layers.
        inputs, outputs: the arrays. before: positions, in `StepTrace.launches`, of the launches that it waits for.
    """

    name: str
    count: int
    stage: int
    reads: int
    writes: int
    weights: int
    label: str
    layer: int | None
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    before: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.reads + self.writes


class StepTrace:
    """What a step launches.

    Args:
        captured: the step's operations.
        experts: (experts of a bank, experts that a token reads of it): a bank counts for its share.
        copies_updates: whether updating a slice copies the whole buffer, as MLX does on CUDA.

    Attributes:
        launches: each after those that it waits for.
    """

    def __init__(self, captured: Captured, *, experts: tuple[int, int] | None = None, copies_updates: bool = False):
        self._experts, self._copies, self._context = experts, copies_updates, captured.context
        self.launches = self._build(captured)

    @classmethod
    def of(cls, captured: Captured, costs: ModelCosts, *, copies_updates: bool = False) -> StepTrace:
        """With the experts that the model's config says."""
        text = costs.config.get("text_config", costs.config)
        count = text.get("num_experts", 0)
        experts = (count, text["num_experts_per_tok"]) if count else None
        return cls(captured, experts=experts, copies_updates=copies_updates)

    @cached_property
    def launch_count(self) -> int:
        """Kernels launched."""
        return sum(launch.count for launch in self.launches)

    @cached_property
    def stages(self) -> int:
        """Launches on the longest chain of dependencies: what a device without limits would do one after the other."""
        return max((launch.stage for launch in self.launches), default=0)

    @cached_property
    def weights(self) -> int:
        """Bytes of parameters that the launches read."""
        return sum(launch.weights for launch in self.launches)

    @cached_property
    def bytes(self) -> int:
        """Bytes read and written by all launches; what one writes and the next reads counts twice."""
        return sum(launch.bytes for launch in self.launches)

    @cached_property
    def predicted(self) -> Prediction:
        """Seconds on an H200, from launches, bytes and grid-wide barriers."""
        kernels = Counter(launch.name for launch in self.launches)
        return predict(self.launch_count, self.bytes, barriers_in(kernels))

    def longest_chain(self) -> list[Launch]:
        """One longest chain of launches that wait for each other, first to last."""
        if not self.launches:
            return []
        index = max(range(len(self.launches)), key=lambda i: self.launches[i].stage)
        chain = [index]
        while self.launches[chain[-1]].before:
            chain.append(max(self.launches[chain[-1]].before, key=lambda i: self.launches[i].stage))
        return [self.launches[i] for i in reversed(chain)]

    def by_name(self) -> list[tuple[str, int, int]]:
        """(name, launches, bytes) of each kind of launch, the most bytes first."""
        counts, moved = Counter(), Counter()
        for launch in self.launches:
            counts[launch.name] += launch.count
            moved[launch.name] += launch.bytes
        return sorted(((name, counts[name], moved[name]) for name in counts), key=lambda row: -row[2])

    def by_layer(self) -> dict[int | None, list[Launch]]:
        """Launches of each layer, in order; None holds those outside the layers, before them and behind."""
        result: dict[int | None, list[Launch]] = {}
        for launch in self.launches:
            result.setdefault(launch.layer, []).append(launch)
        return result

    def widths(self) -> list[int]:
        """Launches in each stage, from the first on: how many could run side by side."""
        widths = [0] * self.stages
        for launch in self.launches:
            widths[launch.stage - 1] += launch.count
        return widths

    # --- building -----------------------------------------------------------------------------------------------------

    def _build(self, captured: Captured) -> list[Launch]:
        launches: list[Launch] = []
        maker: dict[str, tuple[int, ...]] = {}  # array -> launches that its content waits for
        stored: dict[str, int] = {}  # array -> bytes of its memory
        origin: dict[str, str] = {}
        layer_of: dict[str, int | None] = {}
        for operation in captured.operations:
            for value in operation.inputs:
                stored.setdefault(value.name, value.nbytes)
                origin.setdefault(value.name, value.origin)
                if value.name not in layer_of:
                    layer_of[value.name] = _layer(value.origin)
            before = tuple(sorted({i for v in operation.inputs for i in maker.get(v.name, ())}))
            layers = [layer_of[v.name] for v in operation.inputs if layer_of[v.name] is not None]
            # What reads a parameter that is no layer's, the last norm and the head, stands behind all of them.
            behind = any(_is_parameter(v.origin) and _layer(v.origin) is None for v in operation.inputs)
            layer = None if behind else max(layers, default=None)
            is_view = operation.name in VIEWS
            if not is_view:
                launches.append(self._launch(operation, before, launches, stored, origin, layer))
                before = (len(launches) - 1,)
            for value in operation.outputs:
                maker[value.name] = before
                behind = sum(stored[v.name] for v in operation.inputs[:1]) if is_view else value.nbytes
                stored[value.name] = min(value.nbytes, behind) if is_view else behind
                origin[value.name] = origin[operation.inputs[0].name] if is_view and operation.inputs else ""
                layer_of[value.name] = layer
        return launches

    def _launch(
        self,
        operation: Operation,
        before: tuple[int, ...],
        launches: list[Launch],
        stored: Mapping[str, int],
        origin: Mapping[str, str],
        layer: int | None,
    ) -> Launch:
        reads, writes = self._traffic(operation, stored)
        parameters = {v.name: v for v in operation.inputs if _is_parameter(origin[v.name])}.values()
        weights = sum(self._share(value, stored[value.name]) for value in parameters)
        return Launch(
            name=operation.name,
            count=_count(operation),
            stage=1 + max((launches[i].stage for i in before), default=0),
            reads=reads,
            writes=writes,
            weights=min(weights, reads),
            label=_label(origin[value.name] for value in operation.inputs),
            layer=layer,
            inputs=operation.inputs,
            outputs=operation.outputs,
            before=before,
        )

    def _traffic(self, operation: Operation, stored: Mapping[str, int]) -> tuple[int, int]:
        """(bytes read, bytes written)."""
        made = sum(value.nbytes for value in operation.outputs)
        if operation.name in ("Gather", "GatherAxis"):
            chosen = sum(stored[value.name] for value in operation.inputs[1:])
            return made + chosen, made
        if operation.name == "embedding_rows":
            tokens, *matrix = operation.inputs[:4]
            return tokens.nbytes + prod(tokens.shape) * sum(part.nbytes // part.shape[0] for part in matrix), made
        if operation.name in ("SliceUpdate", "DynamicSliceUpdate") and not self._copies:
            update = stored[operation.inputs[1].name]
            return update, update
        seen = {value.name: value for value in operation.inputs}.values()  # an array twice is read once
        return sum(self._share(value, stored[value.name]) for value in seen), made

    def _share(self, value: Value, size: int) -> int:
        """What a token reads of an array: of a bank of experts, the chosen ones (and those that every token takes); of
        a cache's buffer, what is filled."""
        if value.origin == "cache" and self._context and len(value.shape) == 4 and value.shape[2] > self._context:
            return size * self._context // value.shape[2]
        if self._experts is None or len(value.shape) < 3:
            return size
        count, chosen = self._experts
        extra = value.shape[0] - count
        if not 0 <= extra <= count // 2:
            return size
        return round(size * (chosen + extra) / value.shape[0])


def as_record(trace: StepTrace, costs: ModelCosts, context: int) -> dict[str, Any]:
    """A step's counts beside its floor, as plain data."""
    floor = costs.decode(context)
    return {
        "launches": trace.launch_count,
        "stages": trace.stages,
        "widest_stage": max(trace.widths(), default=0),
        "bytes": trace.bytes,
        "floor_bytes": floor.bytes,
        "bytes_over_floor": trace.bytes / floor.bytes,
        "predicted_host_seconds": trace.predicted.host,
        "predicted_device_seconds": trace.predicted.device,
        "by_name": [{"name": name, "launches": count, "bytes": size} for name, count, size in trace.by_name()],
        "longest_chain": [launch.name for launch in trace.longest_chain()],
    }


def _count(operation: Operation) -> int:
    """Launches of an operation: a copy for each part that is joined; and where threadgroups wait for each other, their
    counter needs an output that MLX fills first."""
    if operation.name == "Concatenate":
        return len(operation.inputs)
    return 1 + len(operation.outputs) if operation.name in _filled() else 1


@cache
def _filled() -> frozenset[str]:
    from labkit.kernels.registry import all_entries

    return frozenset(entry.name for entry in all_entries() if entry.resident)


def _layer(path: str) -> int | None:
    parts = path.split(".")
    if "layers" not in parts:
        return None
    return int(parts[parts.index("layers") + 1])


def _is_parameter(path: str) -> bool:
    return bool(path) and path not in ("cache", "constant")


def _label(origins: Any) -> str:
    """The path of the parameter that an operation works with, without the name of its part."""
    for path in origins:
        if _is_parameter(path):
            for suffix in (".weight", ".scales", ".biases"):
                path = path.removesuffix(suffix)
            return path
    return ""
