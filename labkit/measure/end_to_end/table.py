"""The tables of a comparison, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from labkit.measure.end_to_end.curves import Curve, decode_curve, prefill_curve
from labkit.measure.model_costs import ModelCosts


def size_name(tokens: int) -> str:
    """4096 -> "4K"; what is no multiple of 1,024 stays a number."""
    return f"{tokens // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


def side_names(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every side of the records, the judged one first."""
    return list(dict.fromkeys(name for record in records for name in record["sides"]))


def rows(records: Sequence[Mapping[str, Any]], kind: str) -> tuple[list[str], list[list[Any]]]:
    """(columns, rows) of the points of one kind, for people."""
    records = sorted((r for r in records if r["kind"] == kind), key=lambda record: record["length"])
    names = side_names(records)
    columns = ["prompt" if kind == "prefill" else "context", *(f"{name}, tok/s" for name in names)]
    columns += [f"times faster than {name}" for name in names[1:]]
    columns += ["peak GB", *(f"peak GB, {name}" for name in names[1:]), "floor, tok/s", "share of floor"]
    result = []
    for record in records:
        sides = [record["sides"].get(name) for name in names]
        count = record["length"] if kind == "prefill" else 1
        floor = record.get("floor_seconds")
        speeds = [
            f"{side['tokens_per_second']:,.1f}" if side else _why(record, name)
            for side, name in zip(sides, names, strict=True)
        ]
        ratios = [_ratio(record["ratios"].get(name)) for name in names[1:]]
        peaks = [f"{side['peak_bytes'] / 1e9:.2f}" if side else None for side in sides]
        share = [f"{count / floor:,.0f}", f"{record['share_of_floor']:.1%}"] if floor else [None, None]
        result.append([size_name(record["length"]), *speeds, *ratios, *peaks, *share])
    return columns, result


def curves(records: Sequence[Mapping[str, Any]], costs: ModelCosts) -> dict[str, dict[str, Curve]]:
    """For each kind and side with at least three points, the fitted cost curve of the fastest samples: how a cost grows
    shows in what it takes when nothing else is going on."""
    result: dict[str, dict[str, Curve]] = {}
    for kind, fit in (("prefill", prefill_curve), ("decode", decode_curve)):
        for name in side_names(records):
            points = sorted(
                (r["length"], min(r["sides"][name]["seconds"]))
                for r in records
                if r["kind"] == kind and name in r["sides"]
            )
            if len(points) >= 3:
                lengths, seconds = zip(*points, strict=True)
                result.setdefault(kind, {})[name] = fit(costs, lengths, seconds)
    return result


def curve_rows(fitted: Mapping[str, Mapping[str, Curve]]) -> list[list[Any]]:
    """kind, side, growth, share of the longest point, work a second, largest residual, verdict: one row a term."""
    result = []
    for kind, sides in fitted.items():
        for name, curve in sides.items():
            whole = sum(term.seconds[-1] for term in curve.terms)
            worst = max(curve.residuals, key=abs)
            verdict = "as predicted" if curve.as_predicted else "; ".join(curve.reasons)
            told = [f"{worst:+.0%}", verdict]
            for term in curve.terms:
                rate = f"{term.rate:.3g}" if term.rate and term.work[0] != term.work[-1] else None
                result.append([kind, name, term.name, f"{term.seconds[-1] / whole:.0%}", rate, *told])
                told = ["", ""]
    return result


def byte_rows(records: Sequence[Mapping[str, Any]], costs: ModelCosts) -> tuple[list[str], list[list[Any]]]:
    """(columns, rows): bytes of the caches at each context, counted and as every side holds them."""
    records = sorted((r for r in records if r["kind"] == "decode"), key=lambda record: record["length"])
    names = side_names(records)
    columns = ["context", "counted: KV and state, MB", *(f"held by {name}, MB" for name in names)]
    rows = []
    for record in records:
        counted = costs.kv_bytes(record["length"]) + costs.state_bytes
        held = [record["sides"].get(name, {}).get("cache_bytes") for name in names]
        shown = [f"{size / 1e6:,.2f}" if size else None for size in held]
        rows.append([size_name(record["length"]), f"{counted / 1e6:,.2f}", *shown])
    return columns, rows


def _ratio(ratio: Mapping[str, Any] | None) -> str | None:
    if ratio is None:
        return None
    spread = f" ({ratio['low']:.2f}-{ratio['high']:.2f})" if ratio["low"] is not None else " (one round)"
    return f"{ratio['ratio']:.2f}{spread}"


def _why(record: Mapping[str, Any], name: str) -> str | None:
    return "failed" if name in record.get("failed", {}) else None
