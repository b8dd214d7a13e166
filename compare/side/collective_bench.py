"""A benchmark of collectives: the request to a side, its result, and the expected numbers.

    request.json        a `CollectiveRequest`, read by `python -m SIDE --collectives RUN_DIR`
    collectives.json    `CollectiveTimes`

Conventions are from nccl-tests (doc/PERFORMANCE.md). `size` is the full tensor of a gather or scatter;
`count` is one rank's piece. `time_us` is the slowest rank's time. algbw is size / time. busbw is the bytes
that a rank sends on a ring / time, the rate of the links for any number of ranks.
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
"""Names of the ledger. permute is sendrecv of nccl-tests: each rank sends to the next one on a ring."""
KINDS: tuple[Kind, ...] = get_args(Kind)
IN_PIECES = ("all_gather", "reduce_scatter", "all_to_all")
"""Kinds whose tensor has a piece for each rank."""
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
"""Side, platforms and description of each implementation, in the order of tables and colours."""

TYPE = np.dtype(np.float32)
ALIGN = 4  # elements: nccl-tests' pieces are multiples of it
PERIOD, SHIFT = 97, 31  # of the numbers: sums over ranks are exact, and ranks send different numbers

WARMUP, TRIAL = 2, 3  # calls before the measurement; the time of TRIAL calls gives its number of calls
FEWEST, MOST = 5, 20_000


class CollectiveCase(Struct, frozen=True):
    """One collective of one size."""

    kind: Kind
    size: int
    """Requested bytes; `elements` rounds them."""


class CollectiveRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Time each case with each implementation on `ranks` ranks."""

    implementations: tuple[str, ...]
    cases: tuple[CollectiveCase, ...]
    ranks: int
    platform: Platform = "cpu"
    row_s: float = 0.2
    """Approximate seconds for all calls of a row; there are at least FEWEST calls."""
    timeout_s: float = 600.0


class CollectiveRow(Struct, frozen=True, kw_only=True):
    """One line of nccl-tests, with its implementation."""

    implementation: str
    kind: Kind
    ranks: int
    size: int
    """Bytes of the full tensor."""
    count: int
    """Elements of the tensor, or of one rank's piece."""
    time_us: float
    """Mean time of a call on the slowest rank."""
    algbw_gb_s: float
    busbw_gb_s: float
    wrong: int
    """The number of wrong elements on all ranks."""


class CollectiveTimes(Struct, frozen=True, kw_only=True):
    """The rows of a side, and their circumstances, as in a manifest."""

    rows: list[CollectiveRow]
    device_kind: str
    versions: dict[str, str]
    threads: str
    hosts: list[str]


def elements(kind: str, size: int, ranks: int) -> int:
    """`CollectiveRow.count` of a requested size. Pieces are equal, not empty, and multiples of ALIGN."""
    whole = size // TYPE.itemsize
    return max(whole // (ALIGN * ranks), 1) * ALIGN if kind in IN_PIECES else max(whole, 1)


def numbers(rank: int, count: int, *, start: int = 0) -> np.ndarray:
    """The numbers of a rank from element `start` on, (count,), float32: small integers."""
    return np.resize(np.roll(np.arange(PERIOD, dtype=TYPE), -(start + SHIFT * rank)), count)


def sent(kind: str, rank: int, *, ranks: int, count: int) -> np.ndarray:
    """The input of a rank, (n,), float32."""
    return numbers(rank, count * (ranks if kind in ("reduce_scatter", "all_to_all") else 1))


def expected(kind: str, rank: int, *, ranks: int, count: int) -> np.ndarray:
    """The exact result on a rank, (n,), float32."""
    if kind in ("broadcast", "permute"):
        return numbers(0 if kind == "broadcast" else (rank - 1) % ranks, count)
    start = rank * count if kind in ("reduce_scatter", "all_to_all") else 0
    if kind in ("all_reduce", "reduce_scatter"):
        return np.resize(sum(numbers(other, PERIOD, start=start) for other in range(ranks)), count)
    return np.concatenate([numbers(other, count, start=start) for other in range(ranks)])


def measure(
    call: Callable[[], object], *, wait: Callable[[], object], slowest: Callable[[float], float], row_s: float
) -> float:
    """Mean seconds of one `call` on the slowest rank, over calls that take about `row_s` together.

    `wait` returns when all calls so far are done. `slowest` returns the maximum of a value over all ranks,
    and makes the ranks wait for each other.
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
    """The row of a case from its time."""
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
