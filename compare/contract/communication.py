"""Communication of a step: the rows of a ledger, the purposes they have, and a ring's cost.

Engines that write their collectives say at each what it is for, with the constants below. Of a collective
that XLA or a wrapper of PyTorch put there, the purpose is inferred from its kind, axis and size, by the rules
in `jaxpar/measure/ledger.py` and `torchpar/measure/ledger.py`.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from msgspec import Struct

PARAMETERS = "parameters"  # gathered from the devices that share them out
GRADIENTS = "gradients"
REPLICATED_GRADIENTS = "replicated gradients"  # of whole parameters, from parts of the data
TIED_GRADIENTS = "tied gradients"  # of the copies of a weight on the two ends of a pipeline
ACTIVATIONS = "activations"
ACTIVATION_GRADIENTS = "activation gradients"
LOSS, NORM = "loss", "norm"
ROUTING = "routing"  # how many tokens each expert was chosen for
UNUSED = "unused parameters"  # which of them some device used
REPLICATE, RECORD = "replicate", "record"  # before the first step; for the record

# Only ever inferred, where what tells two purposes apart cannot be seen.
METRICS = "metrics"  # a scalar: of the loss or of the norm
ACTIVATIONS_AND_GRADIENTS = "activations and their gradients"  # a message between stages, either way

OF_DERIVATIVE = {PARAMETERS: GRADIENTS, ACTIVATIONS: ACTIVATION_GRADIENTS}
"""What the derivative of a collective is for: the transpose of a gather of parameters scatters gradients."""

PHASES = {
    **dict.fromkeys((PARAMETERS, UNUSED, REPLICATE, RECORD), ""),
    **dict.fromkeys((ACTIVATIONS, LOSS, ROUTING), "forward"),
    **dict.fromkeys((ACTIVATION_GRADIENTS, GRADIENTS, REPLICATED_GRADIENTS, TIED_GRADIENTS), "backward"),
    NORM: "update",
}
"""Purposes that a collective can be given, and when what is for one alone is sent; "" if that is not known.

Backward ends when the mean gradients are there.
"""


class Communication(Struct, frozen=True, kw_only=True):
    """Collectives of one kind along one mesh axis in one steady step, per device, summed over their calls.

    A record has a row for each place in the program that makes them, and for each stage of a pipeline.
    """

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, permute, ..."""
    axis: str
    """The mesh axis it runs along; several that it runs along together are joined by +."""
    calls: int
    bytes: int
    """Logical bytes: the size of the full (gathered) tensor, summed over the calls."""
    wire_bytes: int
    """Bytes one device sends on a ring: 2(n-1)/n of an all-reduce, (n-1)/n of a gather or scatter."""
    purpose: str = ""
    """What it is for: one of the purposes above."""
    group_size: int = 0
    """Devices that speak with each other; like all that follows, only of one place, and not in a sum."""
    dtype: str = ""
    phase: str = ""
    """forward, backward or update; "" if that cannot be told."""
    source: str = ""
    """The place in the program: file and line, the operation, or the module."""
    loops: tuple[int, ...] = ()
    """Turns of the loops of a compiled program that it is in, the outermost first."""
    places: tuple[tuple[str, int], ...] = ()
    """Of what XLA sends: the side's lines that cause it, the innermost first, `("jaxpar/train.py", 12)`."""
    stage: int = 0
    """The rank of the pipeline whose devices do it."""


def summed(rows: Iterable[Communication]) -> list[Communication]:
    """A row for each kind, axis and purpose: the sums over its places, of the stage that has most of it."""
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
    """The rows of the stage that sends most bytes on the wire."""
    sent: dict[int, int] = defaultdict(int)
    for row in rows:
        sent[row.stage] += row.wire_bytes
    busiest = max(sent, key=lambda stage: sent[stage], default=0)
    return [row for row in rows if row.stage == busiest]


def ring_wire_bytes(kind: str, full_bytes: int, group_size: int) -> int:
    """Bytes that one of `group_size` devices sends on a ring for a collective over `full_bytes`, gathered.

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
