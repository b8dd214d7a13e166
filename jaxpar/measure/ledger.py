"""Communication of a compiled step, read from the HLO that XLA made of it.

Logical bytes are those of the full (gathered) tensor; of a permute, what a device sends.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from msgspec.structs import replace

from compare.contract.across_hosts import sent_across
from compare.contract.communication import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    GRADIENTS,
    METRICS,
    PARAMETERS,
    PHASES,
    Communication,
    ring_wire_bytes,
)
from compare.contract.ledger import Ledger
from compare.spec.axes import PP, TP, joined
from jaxpar.measure.hlo import Collective, collectives
from jaxpar.measure.replica_groups import groups_along

SCALAR = 8  # bytes of a float64
_PARTITIONS = re.compile(r"^HloModule .*\bnum_partitions=(\d+)", re.MULTILINE)


def communications(
    hlo: str,
    axis_sizes: Mapping[str, int],
    *,
    problems: list[str] | None = None,
    hosts: Sequence[int] = (),
) -> list[Communication]:
    """The ledger of a compiled function.

    Args:
        hlo: `compiled.as_text()`.
        axis_sizes: mesh axes with their sizes, in the order of the mesh (`mesh.shape`).
        problems: as in `hlo.collectives`.
        hosts: the number of each device's host, in the order of the mesh; without them nothing crosses any.

    Returns:
        A row for each place in the program, per device and per call of the function; of a pipeline for each
        of its ranks. The purpose is what the collective was given (`comm.collectives`), else the inferred
        one. A collective over one device is none.

    Raises:
        UnreadableError: without `problems`, as `hlo.collectives`.
    """
    found, differentiates = collectives(hlo, axis_sizes, problems=problems), "jvp(" in hlo
    stages = axis_sizes.get(PP, 1)
    return _rows(
        found, axis_sizes, inferred_purpose, stages=stages, differentiates=differentiates, hosts=hosts
    )


def ledger_of(function: Callable[..., Any], *arguments: Any, mesh: Mesh) -> Ledger:
    """Ledger of one call of a function: a row for each collective that XLA made of it.

    Args:
        function: jitted or not, with `shard_map` or without. It is compiled, and does not run.
        arguments: of the function: arrays, or `ShapeDtypeStruct`s with shardings.
        mesh: names the axes.

    Raises:
        ValueError: the function runs on another number of devices than the mesh has.
    """
    jitted: Any = function if hasattr(function, "lower") else jax.jit(function)
    hlo = jitted.lower(*arguments).compile().as_text()
    assert hlo, "XLA keeps no text of the compiled function"
    partitions = _PARTITIONS.search(hlo)
    devices = int(partitions[1]) if partitions else 1
    if devices not in (1, mesh.size):
        raise ValueError(f"the function runs on {devices} devices, and the mesh has {mesh.size}")
    problems: list[str] = []
    found = collectives(hlo, mesh.shape, problems=problems)
    rows = _rows(found, mesh.shape, lambda collective, axis: "", stages=1, differentiates="jvp(" in hlo)
    return Ledger(rows=rows, problems=problems)


def _rows(
    found: list[Collective],
    axis_sizes: Mapping[str, int],
    infer: Callable[[Collective, str], str],
    *,
    stages: int,
    differentiates: bool,
    hosts: Sequence[int] = (),
) -> list[Communication]:
    """Rows of collectives, of each stage of a pipeline. Those of one place that are alike are one row."""
    merged: dict[Communication, list[float]] = defaultdict(lambda: [0, 0, 0, 0.0])
    for collective in found:
        axis, group_size = axis_of(collective, axis_sizes)
        if group_size == 1:
            continue
        purpose = collective.purpose or infer(collective, axis)
        size = sum(collective.arrays)
        wire = ring_wire_bytes(collective.kind, size, group_size)
        for stage in range(stages):
            calls = _calls_at(collective, stage, axis_sizes) if stages > 1 else collective.calls
            if not calls:
                continue
            place = Communication(
                kind=collective.kind,
                axis=axis,
                purpose=purpose,
                calls=0,
                bytes=0,
                wire_bytes=0,
                group_size=group_size,
                dtype=", ".join(collective.dtypes),
                phase=_phase(collective, purpose) if differentiates else "",
                source=": ".join(str(part) for part in (collective.source, collective.op_name) if part),
                loops=collective.loops,
                stage=stage,
            )
            total = merged[place]
            across = calls * _across(collective, size, stage, axis_sizes, hosts) if hosts else 0
            added = (calls, calls * size, calls * wire, across)
            total[:] = [one + more for one, more in zip(total, added, strict=True)]
    return [
        replace(place, calls=calls, bytes=size, wire_bytes=wire, crossing_bytes=round(across))
        for place, (calls, size, wire, across) in merged.items()
    ]


def _across(
    collective: Collective, size: int, stage: int, axis_sizes: Mapping[str, int], hosts: Sequence[int]
) -> float:
    """Bytes that the devices of a pipeline's rank send to other hosts in one call."""
    return sum(
        sent_across(collective.kind, size, group, sender, hosts)
        for group in collective.groups
        for sender in (group[:1] if collective.kind == "permute" else group)
        if _stage_of(sender, axis_sizes) == stage
    )


def _stage_of(device: int, axis_sizes: Mapping[str, int]) -> int:
    if PP not in axis_sizes:
        return 0
    return int(np.unravel_index(device, tuple(axis_sizes.values()))[list(axis_sizes).index(PP)])


def _calls_at(collective: Collective, stage: int, axis_sizes: Mapping[str, int]) -> int:
    """Calls on the devices of a pipeline's rank: of a permute those in which they send."""
    senders = {_stage_of(group[0], axis_sizes) for group in collective.groups}
    return collective.calls_at(stage) if collective.kind != "permute" or stage in senders else 0


def _phase(collective: Collective, purpose: str) -> str:
    """When it is sent, in a program that differentiates: see `PHASES`.

    Else by what autodiff made it of. A forward that is computed anew for backward is in backward. Of what no
    autodiff made, and nobody says what it is for, it is not known: gradients may be summed by hand.
    """
    if "transpose(" in collective.op_name:
        return "backward"
    runs_by_schedule = collective.of_turns > 1
    if "jvp(" in collective.op_name or runs_by_schedule:
        return PHASES.get(purpose) or "forward"
    return PHASES.get(purpose) or ("update" if purpose else "")


def inferred_purpose(collective: Collective, axis: str) -> str:
    """A guess, for what XLA put there by itself, without a purpose.

    By size: scalars are of the loss or the norm. By axis: along tp go activations, and permutes along pp
    carry these or, in what autodiff made, their gradients. By kind: other gathers are of parameters, and all
    else is of gradients. It is wrong where XLA does as it likes: a gradient of parameters that it reduces
    along tp counts as one of activations.
    """
    if max(collective.arrays) <= SCALAR:
        return METRICS
    if axis == TP or (axis == PP and collective.kind == "permute"):
        return ACTIVATION_GRADIENTS if collective.backward else ACTIVATIONS
    return PARAMETERS if collective.kind == "all_gather" else GRADIENTS


def axis_of(collective: Collective, axis_sizes: Mapping[str, int]) -> tuple[str, int]:
    """The mesh axis, or axes joined by +, that a collective runs along; and the size of its groups."""
    groups = {frozenset(group) for group in collective.groups}
    if max(map(len, groups)) == 1:
        return "", 1
    for count in range(1, len(axis_sizes) + 1):
        for axes in itertools.combinations(axis_sizes, count):
            candidates = [frozenset(group) for group in groups_along(axes, axis_sizes)]
            if collective.kind == "permute":
                if all(any(pair <= group for group in candidates) for pair in groups):
                    return joined(*axes), len(candidates[0])
            elif groups == set(candidates) and len(candidates[0]) > 1:
                return joined(*axes), len(candidates[0])
    return "?", max(map(len, groups))


def key_of(collective: Collective, axis_sizes: Mapping[str, int]) -> tuple[str, str, str] | None:
    """The kind, axis and purpose under which `communications` counts a collective; None over one device."""
    axis, group_size = axis_of(collective, axis_sizes)
    purpose = collective.purpose or inferred_purpose(collective, axis)
    return (collective.kind, axis, purpose) if group_size > 1 else None
