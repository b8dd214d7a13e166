"""The ledger of what runs inside: every collective, with its place in the program.

Of torchpar's own collectives a row is the collective, whatever it is made of: on gloo a gather is sends. The
dispatcher sees those sends, so that it and our own count are held against each other.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from msgspec.structs import replace
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from compare.contract.axes import DP_SHARD, PP, TP
from compare.contract.communication import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    ACTIVATIONS_AND_GRADIENTS,
    GRADIENTS,
    LOSS,
    PARAMETERS,
    PHASES,
    REPLICATED_GRADIENTS,
    UNUSED,
    Communication,
    ring_wire_bytes,
)
from compare.contract.ledger import Ledger
from torchpar.comm.counter import Call, Traffic, observers
from torchpar.measure.calls import call_of
from torchpar.measure.modules import RunningModules

_NOT_A_PLACE = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[1] / "comm"),
    contextlib.__file__,
    __file__,
)
FSDP2 = str(Path("distributed", "fsdp", "_fully_shard"))
WIDEST = 8
"""Bytes of a float64."""


class Place(NamedTuple):
    """What rows are told apart by."""

    kind: str
    axis: str
    purpose: str
    group_size: int
    dtype: str
    phase: str
    source: str


class LedgerMode(TorchDispatchMode):
    """Notes every collective with its place while it is active; an `Observer` of torchpar's own.

    Args:
        axes: of process groups, by the groups' names.
        own_calls: the count of our own calls, which may be paused.
        infers: give the calls of PyTorch's wrappers the purpose that they have in our engines.

    Attributes:
        is_updating: gradients are ready, and the optimizer is at work.
        seen, own: bytes on the wire by axis: of all that the dispatcher saw, and of our own calls.
        library_calls: those that are not our own, in their order.
    """

    def __init__(self, axes: Mapping[str, str], *, own_calls: Traffic | None = None, infers: bool = False):
        super().__init__()
        self.is_updating = False
        self.seen, self.own = Counter[str](), Counter[str]()
        self.library_calls: list[Call] = []
        self._axes, self._infers = axes, infers
        self._own_calls = own_calls or Traffic()
        self._modules = RunningModules()
        self._rows = dict[Place, list[int]]()
        self._depth = 0

    def __enter__(self) -> "LedgerMode":
        self._modules.__enter__()
        observers.append(self)
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        observers.remove(self)
        self._modules.__exit__(exc_type, exc_val, exc_tb)

    def begins(self, call: Call, full: torch.Tensor, ranks: int) -> None:
        """Note one of torchpar's own collectives; what it sends itself is part of it."""
        self._depth += 1
        if ranks > 1 and not self._own_calls.is_paused:
            dtype = str(full.dtype).removeprefix("torch.")
            self._note(call.kind, call.axis, call.purpose, ranks, dtype, full.nbytes)
            self.own[call.axis] += ring_wire_bytes(call.kind, full.nbytes, ranks)

    def ends(self) -> None:
        """It has been sent."""
        self._depth -= 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor first: what it makes of the operator comes back here
        result = func(*args, **(kwargs or {}))
        if self._own_calls.is_paused or not (seen := call_of(func, args, kwargs or {}, result)):
            return result
        ranks = _resolve_process_group(cast(Any, seen.group)).size()  # a NewType in later PyTorch
        axis = self._axes.get(seen.group, "subgroup")
        self.seen[axis] += ring_wire_bytes(seen.kind, seen.bytes, ranks)
        if ranks > 1 and not self._depth:
            self._note(seen.kind, axis, None, ranks, seen.dtype, seen.bytes)
        return result

    def noted(self) -> "RankLedger":
        """All that was noted; rows in the order in which they first came."""
        rows = [
            Communication(
                **place._asdict(),
                calls=calls,
                bytes=size,
                wire_bytes=ring_wire_bytes(place.kind, size, place.group_size),
            )
            for place, (calls, size) in self._rows.items()
        ]
        return RankLedger(rows, dict(self.seen), dict(self.own))

    def _note(self, kind: str, axis: str, said: str | None, ranks: int, dtype: str, size: int) -> None:
        """Add one call to its row; `said` is None where it was not our own."""
        purpose = said if said is not None else self._inferred_purpose(kind, axis, dtype)
        if said is None:
            self.library_calls.append(Call(kind, axis, purpose))
        place = Place(kind, axis, purpose, ranks, dtype, self._phase(purpose), self._source)
        row = self._rows.setdefault(place, [0, 0])
        row[:] = [row[0] + 1, row[1] + size]

    def _inferred_purpose(self, kind: str, axis: str, dtype: str) -> str:
        """What PyTorch's wrappers use a collective for: mostly to reduce gradients."""
        if not self._infers:
            return ""
        if dtype == "int32":
            return UNUSED  # DDP's map of parameters
        if axis == PP and kind == "permute":
            return ACTIVATIONS_AND_GRADIENTS  # its batches of messages do not say which
        if axis == TP and self._module.endswith(".loss"):
            return LOSS
        if axis == TP and self._modules.are_in_backward:
            return REPLICATED_GRADIENTS if _is_of_fsdp(sys._getframe(1)) else ACTIVATION_GRADIENTS
        if axis == TP:
            return ACTIVATIONS if self._module else REPLICATED_GRADIENTS
        is_of_parameters = axis == DP_SHARD and kind in ("all_gather", "broadcast")
        return PARAMETERS if is_of_parameters else GRADIENTS

    def _phase(self, purpose: str) -> str:
        if self._modules.are_in_backward:
            return "backward"
        if self.is_updating:
            return "update"
        return PHASES.get(purpose, "forward" if self._module else "")

    @property
    def _module(self) -> str:
        """The innermost module that is running."""
        return self._modules.innermost

    @property
    def _source(self) -> str:
        """The innermost line outside of PyTorch, and the innermost module."""
        return ": ".join(part for part in (_line(sys._getframe(1)), self._module) if part)


def _is_of_fsdp(frame: FrameType | None) -> bool:
    """True within what FSDP2 does with the gradients of a unit."""
    while frame and FSDP2 not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


def _line(frame: FrameType | None) -> str:
    while frame and frame.f_code.co_filename.startswith(_NOT_A_PLACE):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"


class RankLedger(NamedTuple):
    """What a `LedgerMode` noted on one rank."""

    rows: list[Communication]
    seen: dict[str, int]
    own: dict[str, int]


def of_all_ranks(ranks: Sequence[RankLedger], *, stages: int, counts_own: bool) -> Ledger:
    """One ledger of all ranks: of each place in each stage that of the rank that has most of it.

    Args:
        ranks: in the order of the mesh, in which the ranks of a stage stand together.
        stages: of the pipeline; 1 without.
        counts_own: all calls are our own, so that the dispatcher must have seen the same bytes.
    """
    most: dict[Communication, Communication] = {}
    for rank, ledger in enumerate(ranks):
        for row in ledger.rows:
            mine = replace(row, stage=rank * stages // len(ranks))
            place = replace(mine, calls=0, bytes=0, wire_bytes=0)
            most[place] = max(most.get(place, mine), mine, key=lambda row: (row.bytes, row.calls))
    rows = sorted(most.values(), key=lambda row: row.stage)
    return Ledger(rows=rows, problems=_disagreements(ranks) if counts_own else [])


def _disagreements(ranks: Sequence[RankLedger]) -> list[str]:
    """Axes along which the dispatcher saw other bytes than our own calls are of.

    Over all ranks, since the last of an axis have the smaller pieces; but for the padding of these.
    """
    seen = sum((Counter(one.seen) for one in ranks), Counter())
    own = sum((Counter(one.own) for one in ranks), Counter())
    calls = sum(row.calls for one in ranks for row in one.rows)
    return [
        f"along {axis} our own calls send {own[axis]:,} bytes, and the dispatcher saw {seen[axis]:,}"
        for axis in sorted({*seen, *own})
        if abs(seen[axis] - own[axis]) > calls * len(ranks) * WIDEST
    ]
