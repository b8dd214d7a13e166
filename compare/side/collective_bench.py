"""A benchmark of collectives: what a side is asked to time, what it leaves, and which numbers are right.

    request.json        a `CollectiveRequest`, read by `python -m SIDE --collectives RUN_DIR`
    collectives.json    `CollectiveTimes`

Conventions of nccl-tests: `size` is the total, the whole tensor of a gather or scatter; `count` is what one
rank gives or gets of it; the time is that of the slowest rank; algbw is size over time, busbw what a rank
sends on a ring over time: what the links do, whatever the number of ranks. Source: nccl-tests,
doc/PERFORMANCE.md.
"""

import math
import time
from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
from msgspec import Struct

from compare.contract.communication import ring_wire_bytes
from compare.contract.request import Platform
from compare.spec.engines.registry import JAX, TORCH

TIMES = "collectives.json"

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "permute"]
"""As ledgers name them. permute is nccl-tests' sendrecv: a ring, on which each rank sends to the next one."""
KINDS: tuple[Kind, ...] = get_args(Kind)
IN_PIECES = ("all_gather", "reduce_scatter", "all_to_all")
"""Those whose tensor is cut into a piece for each rank."""
OURS = "ours"
IMPLEMENTATIONS = {
    "gloo": (TORCH.name, ("cpu",), "PyTorch's stock operation on gloo, ranks are processes"),
    "nccl": (TORCH.name, ("gpu",), "PyTorch's stock operation on NCCL, a rank for each GPU"),
    OURS: (TORCH.name, ("cpu", "gpu"), "torch-manual's way, in a group whose gloo threads yield"),
    "xla": (
        JAX.name,
        ("cpu", "gpu"),
        "shard_map and lax collectives; on a CPU devices are threads, and broadcast a sum with zeros",
    ),
}
"""Side, platforms and description of each way of doing a collective, in the order of tables and colours."""

TYPE = np.dtype(np.float32)
ALIGN = 4  # elements: nccl-tests' pieces are multiples of it
PERIOD, SHIFT = 97, 31  # of the numbers sent: sums over any ranks are exact, and no two ranks send the same

WARMUP, TRIAL = 2, 3  # calls before those that count; and those from which their number is chosen
FEWEST, MOST = 5, 20_000


class CollectiveCase(Struct, frozen=True):
    """One collective of one size."""

    kind: Kind
    size: int
    """Bytes asked for; see `elements` for what becomes of them."""


class CollectiveRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One side's order: time each case in each way, on this many ranks."""

    implementations: tuple[str, ...]
    cases: tuple[CollectiveCase, ...]
    ranks: int
    platform: Platform = "cpu"
    row_s: float = 0.2
    """About how long the calls of a row take together; there are at least five."""
    timeout_s: float = 600.0


class CollectiveRow(Struct, frozen=True, kw_only=True):
    """One line of nccl-tests, and who made it."""

    implementation: str
    kind: Kind
    ranks: int
    size: int
    """Bytes of the whole tensor."""
    count: int
    """Elements: of one rank's piece where there are pieces."""
    time_us: float
    """Of one call on the slowest rank, the mean over many."""
    algbw_gb_s: float
    busbw_gb_s: float
    wrong: int
    """Elements that are not exactly what they should be, over all ranks."""


class CollectiveTimes(Struct, frozen=True, kw_only=True):
    """A side's rows, and their circumstances, as in a manifest."""

    rows: list[CollectiveRow]
    device_kind: str
    versions: dict[str, str]
    threads: str
    hosts: list[str]


def elements(kind: str, size: int, ranks: int) -> int:
    """`CollectiveRow.count` for a size asked for: pieces are equal, multiples of `ALIGN`, not empty."""
    whole = size // TYPE.itemsize
    return max(whole // (ALIGN * ranks), 1) * ALIGN if kind in IN_PIECES else max(whole, 1)


def numbers(rank: int, count: int, *, start: int = 0) -> np.ndarray:
    """The numbers of a rank from element `start` on, (count,): small integers, so that sums are exact."""
    return np.resize(np.roll(np.arange(PERIOD, dtype=TYPE), -(start + SHIFT * rank)), count)


def sent(kind: str, rank: int, *, ranks: int, count: int) -> np.ndarray:
    """Numbers that a rank puts in."""
    return numbers(rank, count * (ranks if kind in ("reduce_scatter", "all_to_all") else 1))


def expected(kind: str, rank: int, *, ranks: int, count: int) -> np.ndarray:
    """Numbers that a rank must find in the result, exactly."""
    if kind in ("broadcast", "permute"):
        return numbers(0 if kind == "broadcast" else (rank - 1) % ranks, count)
    start = rank * count if kind in ("reduce_scatter", "all_to_all") else 0
    if kind in ("all_reduce", "reduce_scatter"):
        return np.resize(sum(numbers(other, PERIOD, start=start) for other in range(ranks)), count)
    return np.concatenate([numbers(other, count, start=start) for other in range(ranks)])


def measure(
    call: Callable[[], object], *, wait: Callable[[], object], slowest: Callable[[float], float], row_s: float
) -> float:
    """Seconds of one `call` on the slowest rank, the mean over so many that they take about `row_s`.

    `wait` returns once all calls so far are done. `slowest` gives each rank the largest of all ranks' values,
    and brings them together.
    """

    def mean_s(calls: int) -> float:
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        return (time.perf_counter() - begun) / calls

    mean_s(WARMUP)
    slowest(0.0)
    trial_s = slowest(mean_s(TRIAL))
    return slowest(mean_s(min(max(math.ceil(row_s / trial_s), FEWEST), MOST)))


def make_row(
    implementation: str, case: CollectiveCase, *, ranks: int, seconds: float, wrong: int
) -> CollectiveRow:
    """A row from its time."""
    count = elements(case.kind, case.size, ranks)
    size = TYPE.itemsize * count * (ranks if case.kind in IN_PIECES else 1)
    return CollectiveRow(
        implementation=implementation,
        kind=case.kind,
        ranks=ranks,
        size=size,
        count=count,
        time_us=seconds * 1e6,
        algbw_gb_s=size / seconds / 1e9,
        busbw_gb_s=ring_wire_bytes(case.kind, size, ranks) / seconds / 1e9,
        wrong=wrong,
    )
