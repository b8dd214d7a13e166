"""Communication of a compiled step, read from its HLO.

Logical bytes count the full (gathered) tensor; for a permute they count the message of one device.
"""

import itertools
import os
import re
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from msgspec.structs import replace

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
from compare.spec.axes import CP, EP, PP, TP, joined, parts_of
from jaxpar.measure.hlo import SourceLine, groups_along
from jaxpar.measure.hlo_collectives import Collective, collectives
from jaxpar.mlp import EXPERTS

SCALAR = 8  # bytes of a float64
PACKAGE = Path(__file__).parents[1]
_PARTITIONS = re.compile(r"^HloModule .*\bnum_partitions=(\d+)", re.MULTILINE)


def ledger_of(function: Callable[..., Any], *arguments: Any, mesh: Mesh) -> Ledger:
    """The ledger of one call of a function: a row for each collective of XLA, with the line that causes it.

    The function is compiled and does not run. It may be jitted, and it may use `shard_map`. Arguments are
    arrays, or `ShapeDtypeStruct`s with shardings. Raises ValueError: the mesh has other devices.
    """
    jitted: Any = function if hasattr(function, "lower") else jax.jit(function)
    hlo = jitted.lower(*arguments).compile().as_text()
    assert hlo, "XLA keeps no text of the compiled function"
    partitions = _PARTITIONS.search(hlo)
    devices = int(partitions[1]) if partitions else 1
    if devices not in (1, mesh.size):
        raise ValueError(f"the function runs on {devices} devices, and the mesh has {mesh.size}")
    ledger = read_ledger(hlo, mesh.shape, is_step=False)
    if devices < mesh.size:
        ledger.problems.append(
            f"the function runs on 1 of {mesh.size} devices: place its arguments on the mesh, "
            "or give in_shardings"
        )
    return ledger


def read_ledger(hlo: str, axis_sizes: Mapping[str, int], *, is_step: bool = True) -> Ledger:
    """The ledger of a compiled program, per device. Equal collectives of one place share a row.

    For a training step each rank of a pipeline has its own rows, and a missing purpose (`comm.collectives`)
    is inferred.
    """
    stages, problems = axis_sizes.get(PP, 1) if is_step else 1, list[str]()
    totals: dict[Communication, list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0])
    differentiates = "jvp(" in hlo
    for collective in collectives(hlo, axis_sizes, problems):
        axis, group_size = axis_of(collective, axis_sizes)
        if group_size == 1:
            continue
        purpose = collective.purpose or (inferred_purpose(collective, axis) if is_step else "")
        if is_step:
            source = str(collective.stack[0]) if collective.stack else "", collective.op_name
        else:
            source = _users_line(collective.stack), collective.op_name.rpartition("/")[2].rstrip(")")
        size = sum(collective.arrays)
        wire = ring_wire_bytes(collective.kind, size, group_size)
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
            source=": ".join(filter(None, source)),
            loops=collective.loops,
            places=_places(collective) if is_step else (),
            is_async=collective.is_async,
            overlapped=collective.overlapped,
            algorithm=collective.algorithm,
        )
        for stage in _senders(collective, axis_sizes) if stages > 1 else [0]:
            calls, total = collective.calls_at(stage), totals[replace(place, stage=stage)]
            more = (calls, calls * size, calls * wire, calls * collective.scalars, calls * collective.cycles)
            total[:] = map(sum, zip(total, more, strict=True))
    rows = [
        replace(place, calls=calls, bytes=size, wire_bytes=wire, scalars=scalars, cycles=cycles)
        for place, (calls, size, wire, scalars, cycles) in totals.items()
        if calls
    ]
    return Ledger(rows=rows, problems=problems)


def _users_line(stack: Sequence[SourceLine]) -> str:
    """The innermost line outside of this package and of installed packages; "" for no lines."""
    installed, own = sysconfig.get_paths()["purelib"], PACKAGE.parent
    ours = tuple(f"{own / name}{os.sep}" for name in ("jaxpar", "compare", "shardpair"))
    mine = [line for line in stack if not line.file.startswith((installed, *ours))]
    return str((mine or [*stack] or [""])[0])


def _places(collective: Collective) -> tuple[tuple[str, int], ...]:
    """The lines of this package that cause a collective, each once; JAX repeats lines when it retraces."""
    lines = (line for line in collective.stack if Path(line.file).is_relative_to(PACKAGE))
    places = ((Path(line.file).relative_to(PACKAGE.parent).as_posix(), line.line) for line in lines)
    return tuple(dict.fromkeys(places))


def _senders(collective: Collective, axis_sizes: Mapping[str, int]) -> list[int]:
    """The ranks of a pipeline that send: the sources of a permute, otherwise all."""
    if collective.kind != "permute":
        return list(range(axis_sizes[PP]))
    places = np.unravel_index([group[0] for group in collective.groups], tuple(axis_sizes.values()))
    return sorted(set(places[list(axis_sizes).index(PP)].tolist()))


def _phase(collective: Collective, purpose: str) -> str:
    """The phase of a collective, from the marks of autodiff or from its purpose; "" if unknown."""
    if "transpose(" in collective.op_name:
        return "backward"
    _, turns = collective.turns
    by_autodiff_or_schedule = "jvp(" in collective.op_name or turns > 1
    return PHASES.get(purpose) or ("forward" if by_autodiff_or_schedule else "update" if purpose else "")


def inferred_purpose(collective: Collective, axis: str) -> str:
    """The likely purpose of a collective that XLA inserted.

    Along tp, gradients of parameters count as activations. Along cp, XLA sums gradients of keys and values
    together with the gradients of parameters. Along ep, experts send tokens alone, because ep splits their
    parameters.
    """
    if max(collective.arrays) <= SCALAR:
        return METRICS
    permutes, reduces = (collective.kind == kind for kind in ("permute", "all_reduce"))
    is_of_tokens = EP in parts_of(axis) and EXPERTS in collective.op_name
    if axis == TP or (axis == PP and permutes) or (axis == CP and not reduces) or is_of_tokens:
        return ACTIVATION_GRADIENTS if collective.backward else ACTIVATIONS
    return PARAMETERS if collective.kind == "all_gather" else GRADIENTS


def axis_of(collective: Collective, axis_sizes: Mapping[str, int]) -> tuple[str, int]:
    """The mesh axis of a collective, or several joined by +, and the size of its groups."""
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
    """The kind, axis and purpose of a collective in `read_ledger`; None for one device."""
    axis, group_size = axis_of(collective, axis_sizes)
    purpose = collective.purpose or inferred_purpose(collective, axis)
    return (collective.kind, axis, purpose) if group_size > 1 else None
