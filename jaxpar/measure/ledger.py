"""Communication of a compiled step, read from the HLO that XLA made of it.

The two ends of a pipeline are both counted, though no device is both: an upper bound. Logical bytes are those
of the full (gathered) tensor.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from compare.contract.axes import PP, TP, joined
from compare.contract.communication import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    GRADIENTS,
    METRICS,
    PARAMETERS,
    Communication,
    ring_wire_bytes,
)
from compare.contract.ledger import Ledger
from jaxpar.measure.hlo import Collective, collectives
from jaxpar.measure.replica_groups import groups_along

SCALAR = 8  # bytes of a float64
_PARTITIONS = re.compile(r"^HloModule .*\bnum_partitions=(\d+)", re.MULTILINE)


def communications(hlo: str, axis_sizes: Mapping[str, int]) -> list[Communication]:
    """The ledger of a compiled function.

    Args:
        hlo: `compiled.as_text()`.
        axis_sizes: mesh axes with their sizes, in the order of the mesh (`mesh.shape`).

    Returns:
        One entry per kind, axis and purpose, per device and per call of the function: the purpose that
        the collective was given (`comm.collectives`), else the inferred one. A collective over one device
        is none.

    Raises:
        ValueError: a collective in a loop of unknown length, or replica groups in an unknown spelling.
    """
    calls: Counter[tuple[str, str, str]] = Counter()
    size: Counter[tuple[str, str, str]] = Counter()
    wire: Counter[tuple[str, str, str]] = Counter()
    for collective in collectives(hlo, axis_sizes):
        axis, group_size = _axis(collective, axis_sizes)
        if group_size == 1:
            continue
        purpose = collective.purpose or _inferred_purpose(collective, axis)
        key = (collective.kind, axis, purpose)
        calls[key] += collective.calls
        size[key] += collective.calls * sum(collective.arrays)
        wire[key] += collective.calls * ring_wire_bytes(collective.kind, sum(collective.arrays), group_size)
    return [
        Communication(
            kind=kind, axis=axis, purpose=purpose, calls=calls[key], bytes=size[key], wire_bytes=wire[key]
        )
        for key in sorted(calls)
        for kind, axis, purpose in [key]
    ]


def ledger_of(function: Callable[..., Any], *arguments: Any, mesh: Mesh) -> Ledger:
    """What one call of a function communicates: a row for each collective that XLA made of it.

    Args:
        function: jitted or not, with `shard_map` or without. It is compiled, and does not run.
        arguments: its own: arrays, or `ShapeDtypeStruct`s with shardings.
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
    differentiates = any("jvp(" in collective.op_name for collective in found)
    rows = [_row(collective, mesh.shape, differentiates=differentiates) for collective in found]
    return Ledger(rows=[row for row in rows if row.group_size > 1], problems=problems)


def _row(collective: Collective, axis_sizes: Mapping[str, int], *, differentiates: bool) -> Communication:
    axis, group_size = _axis(collective, axis_sizes)
    size = sum(collective.arrays)
    phase = ""
    if differentiates:
        of_forward = "jvp(" in collective.op_name and "transpose(" not in collective.op_name
        phase = "forward" if of_forward else "backward" if "transpose(" in collective.op_name else "update"
    return Communication(
        kind=collective.kind,
        axis=axis,
        purpose=collective.purpose,
        calls=collective.calls,
        bytes=collective.calls * size,
        wire_bytes=collective.calls * ring_wire_bytes(collective.kind, size, group_size),
        group_size=group_size,
        dtype=", ".join(collective.dtypes),
        phase=phase,
        source=": ".join(str(part) for part in (collective.source, collective.op_name) if part),
    )


def _inferred_purpose(collective: Collective, axis: str) -> str:
    """A guess, for what XLA put there by itself, without a purpose.

    By size: scalars are of the loss or the norm. By axis: along tp go activations, and permutes along pp
    carry these or, in what autodiff made, their gradients. By kind: other gathers are of parameters, and all
    else is of gradients. It is wrong where XLA does as it likes: along tp gradients of activations count as
    activations, and so does a gradient that XLA reduces along tp.
    """
    if max(collective.arrays) <= SCALAR:
        return METRICS
    if axis == TP:
        return ACTIVATIONS
    if axis == PP and collective.kind == "permute":
        return ACTIVATION_GRADIENTS if collective.backward else ACTIVATIONS
    return PARAMETERS if collective.kind == "all_gather" else GRADIENTS


def _axis(collective: Collective, axis_sizes: Mapping[str, int]) -> tuple[str, int]:
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
    axis, group_size = _axis(collective, axis_sizes)
    purpose = collective.purpose or _inferred_purpose(collective, axis)
    return (collective.kind, axis, purpose) if group_size > 1 else None
