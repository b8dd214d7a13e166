"""What a compiled step communicates, read from the HLO that XLA made of it.

Static and exact: collectives of the optimised module, times the trip counts of the loops around them.
What a loop runs only at some turns, in a branch, says so by a named scope `runs_N_of_M` (the innermost
counts). The two ends of a pipeline are both counted, though no device is both: an upper bound.
Logical bytes are those of the full (gathered) tensor. Read through `compiled.as_text()`, which is public.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from compare.contract.record import Communication, ring_wire_bytes

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (.*)$")
_OPCODE = re.compile(r"(?<=[\])}] )([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+\d+[a-z0-9]*|pred)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:body|calls|to_apply|branch_computations|true_computation|false_computation)=")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=@?mesh\[([^\]]*)\]([^{]*)\{([^}]*)\}")
_DEVICE_IDS = re.compile(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)|device_ids=\(([\d,]+)\)")
_SHARE = re.compile(r"\bruns_(\d+)_of_(\d+)\b")
_BACKWARD = re.compile(r'op_name="[^"]*\btranspose\(')
_PURPOSE = re.compile(r'op_name="[^"]*\bfor_(\w+?)\b')


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective instruction.

    Attributes:
        kind: as in `KINDS`.
        groups: device positions that speak with each other; for a permute, (source, target) pairs.
        arrays: bytes of each array that it moves, full (gathered) size.
        calls: how often it runs in one step.
        share: (N, M) if the branch that it is in is taken at N of M turns of the loop around it.
        purpose: from a named scope `for_PURPOSE` around what made it; or "".
        backward: whether autodiff made it.
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]
    arrays: tuple[int, ...]
    calls: int = 1
    share: tuple[int, int] = (1, 1)
    purpose: str = ""
    backward: bool = False


def communications(hlo: str, axis_sizes: Mapping[str, int]) -> list[Communication]:
    """The ledger of a compiled function.

    Args:
        hlo: `compiled.as_text()`.
        axis_sizes: mesh axes with their sizes, in the order of the mesh (`mesh.shape`).

    Returns:
        One entry per kind, axis and purpose, per device and per call of the function. Purpose: what a
        named scope `for_PURPOSE` says; else scalars are for the loss and its like, "metrics", what runs
        along tp is for "activations", a permute along pp for these or, in backward, for "activation
        gradients", a gather along dp for "parameters", and a reduction for "gradients". A collective over
        one device is none.

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
        purpose = collective.purpose or _purpose(collective, axis)
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


def _purpose(collective: Collective, axis: str) -> str:
    if max(collective.arrays) <= 8:
        return "metrics"
    if axis == "tp":
        return "activations"
    if axis == "pp" and collective.kind == "permute":
        return "activation gradients" if collective.backward else "activations"
    return "parameters" if collective.kind == "all_gather" else "gradients"


def collectives(hlo: str, axis_sizes: Mapping[str, int]) -> list[Collective]:
    """Every collective instruction that a module runs, with the number of its calls."""
    computations, entry = _computations(hlo)
    return [
        replace(found, calls=found.calls * found.share[0] // found.share[1])
        for found in _walk(entry, computations, axis_sizes, times=1)
    ]


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """The instructions of each computation, by its name; and the name of the entry."""
    computations: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            name = header[2]
            computations[name] = []
            entry = name if header[1] else entry
        elif name and (instruction := _INSTRUCTION.match(line)):
            computations[name].append(instruction[1])
    return computations, entry


def _walk(
    name: str, computations: dict[str, list[str]], axis_sizes: Mapping[str, int], *, times: int
) -> Iterator[Collective]:
    for text in computations[name]:
        opcode = _opcode(text)
        if opcode.removesuffix("-start") in KINDS:
            yield replace(_collective(text, opcode, axis_sizes), calls=times)
        elif not opcode.endswith("-done"):  # its start was counted
            inner = [
                c for called in _called(text) for c in _walk(called, computations, axis_sizes, times=times)
            ]
            if opcode == "while" and inner:
                trips = _trip_count(text)
                inner = [replace(collective, calls=collective.calls * trips) for collective in inner]
            yield from inner


def _opcode(text: str) -> str:
    match = _OPCODE.search(text)
    return match[1] if match else ""


def _called(text: str) -> list[str]:
    """Names of the computations that an instruction runs."""
    names = []
    for match in _CALLED.finditer(text):
        target = re.match(r"\{([^}]*)\}|(%?[\w.\-]+)", text[match.end() :])
        if target:
            names += [name.strip().lstrip("%") for name in (target[1] or target[2]).split(",")]
    return names


def _trip_count(text: str) -> int:
    match = _TRIP_COUNT.search(text)
    if not match:
        raise ValueError(f"a loop with a collective in it has no known trip count: {text[:120]}")
    return int(match[1])


def _collective(text: str, opcode: str, axis_sizes: Mapping[str, int]) -> Collective:
    kind = KINDS[opcode.removesuffix("-start")]
    groups = _groups(text, axis_sizes)
    shapes = text[: text.index(f" {opcode}(")]
    arrays = [_bytes(dtype, dims) for dtype, dims in _ARRAY.findall(shapes)]
    if opcode == "collective-permute-start":
        arrays = arrays[1:2]  # (operand, result, two context words)
    elif opcode in ("all-gather-start", "reduce-scatter-start", "all-to-all-start"):
        arrays = arrays[len(arrays) // 2 :]  # (operands, results)
    if kind == "reduce_scatter":
        arrays = [array * len(groups[0]) for array in arrays]
    said = _PURPOSE.search(text)
    turns, of_turns = (_SHARE.findall(text) or [(1, 1)])[-1]
    return Collective(
        kind=kind,
        groups=groups,
        arrays=tuple(arrays),
        share=(int(turns), int(of_turns)),
        purpose=said[1].replace("_", " ") if said else "",
        backward=bool(_BACKWARD.search(text)),
    )


def _bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return math.prod(int(dim) for dim in dims.split(",") if dim) * bits // 8


def _groups(text: str, axis_sizes: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    """Replica groups in any of XLA's spellings: {{0,1},{2,3}}, [2,2]<=[4], and mesh['x'=2,'y'=2] {'x'}."""
    everyone = math.prod(axis_sizes.values())
    if match := _LISTED.search(text):
        groups = re.findall(r"\{([\d,]+)\}", match[1])
        return tuple(tuple(map(int, group.split(","))) for group in groups) or (tuple(range(everyone)),)
    if match := _IOTA.search(text):
        shape, source = (tuple(map(int, match[i].split(","))) for i in (1, 2))
        ids = _transposed(source, match[3])
        return tuple(tuple(int(i) for i in row) for row in ids.reshape(shape))
    if match := _NAMED.search(text):
        sizes = {name: int(size) for name, size in re.findall(r"'?([\w]+)'?=(\d+)", match[1])}
        return _groups_along(tuple(re.findall(r"\w+", match[3])), sizes, _device_ids(match[2]))
    raise ValueError(f"a collective whose replica groups cannot be read: {text[:200]}")


def _device_ids(text: str) -> np.ndarray | None:
    """The devices of a named mesh that XLA has ordered anew: ([2,2]T(1,0)) or (0,2,1,3)."""
    match = _DEVICE_IDS.search(text)
    if not match:
        return None
    if match[3]:
        return np.array([int(i) for i in match[3].split(",")])
    return _transposed(tuple(map(int, match[1].split(","))), match[2])


def _transposed(shape: tuple[int, ...], dims: str | None) -> np.ndarray:
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose([int(dim) for dim in dims.split(",")]) if dims else ids


def _groups_along(
    axes: tuple[str, ...], axis_sizes: Mapping[str, int], ids: np.ndarray | None = None
) -> tuple[tuple[int, ...], ...]:
    """The groups of devices that differ only along `axes`; `ids` if they are not in order."""
    ids = np.arange(math.prod(axis_sizes.values())) if ids is None else ids
    ids = ids.reshape(tuple(axis_sizes.values()))
    last = [list(axis_sizes).index(axis) for axis in axes]
    ids = np.moveaxis(ids, last, range(-len(axes), 0))
    size = math.prod(axis_sizes[axis] for axis in axes)
    return tuple(tuple(int(i) for i in row) for row in ids.reshape(-1, size))


def _axis(collective: Collective, axis_sizes: Mapping[str, int]) -> tuple[str, int]:
    """The mesh axis, or axes joined by +, that a collective runs along; and the size of its groups."""
    groups = {frozenset(group) for group in collective.groups}
    if max(map(len, groups)) == 1:
        return "", 1
    for count in range(1, len(axis_sizes) + 1):
        for axes in itertools.combinations(axis_sizes, count):
            candidates = [frozenset(group) for group in _groups_along(axes, axis_sizes)]
            if collective.kind == "permute":
                if all(any(pair <= group for group in candidates) for pair in groups):
                    return "+".join(axes), len(candidates[0])
            elif groups == set(candidates) and len(candidates[0]) > 1:
                return "+".join(axes), len(candidates[0])
    return "?", max(map(len, groups))
