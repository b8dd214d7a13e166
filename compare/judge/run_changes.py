"""What two records were asked for and what they cost, field by field."""

import math
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from compare.contract.communication import summed
from compare.contract.record import Record
from compare.judge.costs import cost_of

_OF_NO_NUMBER = ("timeout_s", "cache_dir", "later_step")
COSTS = {
    "final_loss": "final loss (nats)",
    "step_time_ms_median": "step time, median (ms)",
    "tokens_per_s": "tokens/s, at the median step",
    "compile_s": "compilation, or cache read (s)",
    "cpu_time_s": "CPU time, all in all (s)",
    "peak_mem_bytes": "peak memory per device (bytes)",
    "comm_calls": "collectives per step",
    "comm_bytes": "communicated per step (bytes)",
}
"""Figures of `Cost` that are compared, with their names in tables."""


class Change(Struct, frozen=True, kw_only=True):
    """A setting that is another one in the second run."""

    field: str
    a: str
    b: str


class CostChange(Struct, frozen=True, kw_only=True):
    """A figure of both runs; it decides nothing."""

    cost: str
    a: float | int
    b: float | int

    @property
    def ratio(self) -> float:
        """The second's over the first's; NaN over zero."""
        return self.b / self.a if self.a else math.nan


def changed_settings(a: Record, b: Record) -> Iterator[Change]:
    """Fields of the request, and the circumstances, that differ."""
    first, second = _fields(a), _fields(b)
    if first["corpus_sha256"] == second["corpus_sha256"]:  # another copy of the same text
        second["experiment.data.source"] = first.get("experiment.data.source", "")
    for field in dict.fromkeys([*first, *second]):
        before, after = first.get(field, "-"), second.get(field, "-")
        if before != after:
            yield Change(field=field.removeprefix("experiment."), a=before, b=after)


def _fields(run: Record) -> dict[str, str]:
    manifest = run.manifest
    asked = _flat(msgspec.to_builtins(run.request)) if run.request else {}
    ran = {
        "corpus_sha256": manifest.corpus_sha256[:12],
        "device_kind": manifest.device_kind,
        "threads": manifest.threads,
        **{f"version of {package}": version for package, version in manifest.versions.items()},
    }
    return {name: value for name, value in asked.items() if name not in _OF_NO_NUMBER} | ran


def _flat(value: object, prefix: str = "") -> dict[str, str]:
    if not isinstance(value, dict):
        return {prefix.removesuffix("."): str(value)}
    found: dict[str, str] = {}
    for name, inner in value.items():
        found |= _flat(inner, f"{prefix}{name}.")
    return found


def changed_costs(a: Record, b: Record) -> list[CostChange]:
    """The figures of the table of costs, then each kind of message's bytes in a step."""
    first, second = cost_of(a), cost_of(b)
    pairs = {label: (getattr(first, name), getattr(second, name)) for name, label in COSTS.items()}
    sent = [_sent(run) for run in (a, b)]
    pairs |= {name: (sent[0].get(name, 0), sent[1].get(name, 0)) for name in sorted({*sent[0], *sent[1]})}
    return [CostChange(cost=cost, a=x, b=y) for cost, (x, y) in pairs.items()]


def _sent(run: Record) -> dict[str, int]:
    return {
        " ".join(f"{row.kind} {row.axis} {row.purpose} (bytes)".split()): row.bytes
        for row in summed(run.ledger.rows)
    }
