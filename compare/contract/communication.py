"""Communication of a step: the rows of a ledger, their purposes, and the cost of a ring.

Hand-written engines pass a purpose to each collective, one of the constants below. XLA and PyTorch's wrappers
pass none. `jaxpar/measure/ledger.py` and `torchpar/measure/ledger.py` infer it from kind, axis and size.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from msgspec import Struct

PARAMETERS = "parameters"  # gathered from their shards
GRADIENTS = "gradients"
REPLICATED_GRADIENTS = "replicated gradients"  # of replicated parameters, from different data
TIED_GRADIENTS = "tied gradients"  # of the two copies of the tied weight in a pipeline
ACTIVATIONS = "activations"
ACTIVATION_GRADIENTS = "activation gradients"
LOSS, NORM = "loss", "norm"
ROUTING = "routing"  # numbers of tokens per expert
UNUSED = "unused parameters"  # flags: which parameters some device used
REPLICATE, RECORD = "replicate", "record"  # before the first step; to write the record

# Inferred purposes that cannot be separated further.
METRICS = "metrics"  # a scalar: loss or norm
ACTIVATIONS_AND_GRADIENTS = "activations and their gradients"  # messages between stages

OF_DERIVATIVE = {PARAMETERS: GRADIENTS, ACTIVATIONS: ACTIVATION_GRADIENTS}
"""Purpose of a collective's derivative: the transpose of a parameter gather scatters gradients."""

PHASES = {
    **dict.fromkeys((PARAMETERS, UNUSED, REPLICATE, RECORD), ""),
    **dict.fromkeys((ACTIVATIONS, LOSS, ROUTING), "forward"),
    **dict.fromkeys((ACTIVATION_GRADIENTS, GRADIENTS, REPLICATED_GRADIENTS, TIED_GRADIENTS), "backward"),
    NORM: "update",
}
"""Purposes, and the phase in which a message of each is sent; "" if the phase is unknown.

Backward ends when the mean gradients are complete.
"""


class Communication(Struct, frozen=True, kw_only=True):
    """Collectives of one kind along one mesh axis in one steady step, per device, summed over their calls.

    A record has one row per place in the program and per pipeline stage.
    """

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, permute, ..."""
    axis: str
    """Mesh axis of the collective; several axes are joined by +."""
    calls: int
    bytes: int
    """Logical bytes: the size of the full (gathered) tensor, summed over the calls."""
    wire_bytes: int
    """Bytes one device sends on a ring: 2(n-1)/n of an all-reduce, (n-1)/n of a gather or scatter."""
    scalars: int = 0
    """Bytes, of `bytes`, of single numbers, such as a loss. XLA sends a loss together with gradients."""
    purpose: str = ""
    """Purpose: one of the constants above."""
    group_size: int = 0
    """Number of devices in the group. This field and the next fields describe one place, not a sum."""
    dtype: str = ""
    phase: str = ""
    """forward, backward or update; "" if unknown."""
    source: str = ""
    """Place in the program: file and line, operation, or module."""
    loops: tuple[int, ...] = ()
    """Iteration counts of the enclosing loops of a compiled program, outermost first."""
    places: tuple[tuple[str, int], ...] = ()
    """Source lines that cause a message of XLA, innermost first: `("jaxpar/train.py", 12)`."""
    stage: int = 0
    """Pipeline rank of the devices."""
    is_async: bool = False
    """Whether a compiled program may compute between the start and the end of a call."""
    overlapped: tuple[str, ...] = ()
    """Operations of a compiled program between start and end, one for each kernel of a call."""
    cycles: int = 0
    """XLA:TPU's estimate of the cycles of these operations, summed over the calls."""
    algorithm: str = ""
    """XLA:TPU's name of the algorithm."""


def summed(rows: Iterable[Communication]) -> list[Communication]:
    """One row per kind, axis and purpose: sums over its places, for the pipeline stage with the most
    bytes."""
    sums: dict[tuple[str, str, str], dict[int, list[int]]] = defaultdict(dict)
    for row in rows:
        total = sums[row.kind, row.axis, row.purpose].setdefault(row.stage, [0, 0, 0])
        total[:] = [total[0] + row.bytes, total[1] + row.calls, total[2] + row.wire_bytes]
    return [
        Communication(kind=kind, axis=axis, purpose=purpose, bytes=size, calls=calls, wire_bytes=wire)
        for (kind, axis, purpose), by_stage in sorted(sums.items())
        for size, calls, wire in [max(by_stage.values())]
    ]


def of_busiest_stage(rows: Sequence[Communication]) -> list[Communication]:
    """Rows of the stage that sends the most bytes on the wire."""
    sent: dict[int, int] = defaultdict(int)
    for row in rows:
        sent[row.stage] += row.wire_bytes
    busiest = max(sent, key=lambda stage: sent[stage], default=0)
    return [row for row in rows if row.stage == busiest]


def ring_wire_bytes(kind: str, full_bytes: int, group_size: int) -> int:
    """Bytes that each of `group_size` devices sends on a ring; `full_bytes` is the size of the gathered
    tensor.

    Rounded down. Source: Thakur et al., "Optimization of collective communication operations in MPICH", and
    nccl-tests' conventions.
    """
    n = group_size
    if n == 1:
        return 0
    if kind == "all_reduce":
        return 2 * (n - 1) * full_bytes // n
    if kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (n - 1) * full_bytes // n
    return full_bytes  # broadcast, send, permute
