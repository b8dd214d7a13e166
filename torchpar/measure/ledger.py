"""The ledger of what runs inside: every collective, with its place in the program.

Of torchpar's own collectives a row is the collective, whatever it is made of: on gloo a gather is sends. The
dispatcher sees those sends, so that it and our own count are held against each other. What goes past the
dispatcher, the numbers of each process group tell.
"""

import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.distributed as dist
from msgspec.structs import replace

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
from compare.spec.axes import DP_SHARD, PP, TP
from torchpar.comm.collectives import Call, Traffic, observers
from torchpar.measure.calls import call_of
from torchpar.measure.dispatcher import numbers, watched
from torchpar.measure.frames import is_of_fsdp, is_of_optimizer, line_of
from torchpar.measure.modules import RunningModules
from torchpar.measure.waits import waits_held

"""Ranks that speak with each other, in order; of a message its sender and its receiver."""
WIDEST = 8
"""Bytes of a float64."""


class LedgerKey(NamedTuple):
    """Key of a row of the ledger."""

    kind: str
    axis: str
    purpose: str
    group_size: int
    dtype: str
    phase: str
    source: str


class LedgerMode:
    """Notes the collectives of all threads, with their places, while it is entered; an `Observer` of our own.

    Args:
        axes: of process groups, by the groups' names.
        own_calls: the count of our own calls, which may be paused.
        infers: give the calls of PyTorch's wrappers the purpose that they have in our engines.

    Attributes:
        is_updating: gradients are ready, and the optimizer is at work.
        seen, own: bytes on the wire by axis: of all that the dispatcher saw, and of our own calls.
        library_calls: calls by libraries, in their order.
        problems: calls that could not be counted.
    """

    def __init__(self, axes: Mapping[str, str], *, own_calls: Traffic | None = None, infers: bool = False):
        self.is_updating = False
        self.seen, self.own = Counter[str](), Counter[str]()
        self.library_calls: list[Call] = []
        self.problems: list[str] = []
        self._axes, self._infers = axes, infers
        self._own_calls = own_calls or Traffic()
        self._modules = RunningModules()
        self._rows = dict[LedgerKey, list[int]]()
        self._thread = threading.local()
        self._watch = ExitStack()

    def __enter__(self) -> "LedgerMode":
        self._past = numbers.past()
        self._watch.enter_context(self._modules)
        self._watch.enter_context(watched(self))
        self._watch.enter_context(waits_held(self._objects))
        observers.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        observers.remove(self)
        self._watch.close()
        for group, past in numbers.past().items():
            where = f"over {self._axis(group)} (group {group})"
            if past < 0:
                self._objects(
                    f"{where} the backend does not number what it does: some may go past the dispatcher"
                )
            elif count := max(0, past - self._past.get(group, 0)):
                self._objects(f"{where} {count} went past PyTorch's dispatcher, to the backend: in no row")

    def begins(self, call: Call, full: torch.Tensor, members: Sequence[int], to: int | None) -> None:
        """Note one of torchpar's own collectives, `full` of any shape, and the calls within it."""
        self._depth += 1
        ranks = len(members)
        if ranks > 1 and not self._own_calls.is_paused:
            dtype = str(full.dtype).removeprefix("torch.")
            self._note(call.kind, call.axis, call.purpose, ranks, dtype, full.nbytes)
            self.own[call.axis] += ring_wire_bytes(call.kind, full.nbytes, ranks)

    def ends(self) -> None:
        """The call has been sent."""
        self._depth -= 1

    def sees(self, name: str, arguments: tuple, group: dist.ProcessGroup) -> None:
        """Note an operator, unless it is part of one of our own. What cannot be read is a problem."""
        if self._own_calls.is_paused:
            return
        ranks, axis = group.size(), self._axis(str(group.group_name))
        try:
            if seen := call_of(name, arguments, ranks):
                self.seen[axis] += ring_wire_bytes(seen.kind, seen.bytes, ranks)
                if ranks > 1 and not self._depth:
                    self._note(seen.kind, axis, None, ranks, seen.dtype, seen.bytes)
        except Exception as error:  # an observer never breaks what it watches
            self._objects(f"{name} over {axis} is in no row: {error}")

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
        return RankLedger(rows, dict(self.seen), dict(self.own), tuple(self.problems))

    @property
    def _depth(self) -> int:
        """How many of our own collectives are being sent, by this thread."""
        return getattr(self._thread, "depth", 0)

    @_depth.setter
    def _depth(self, depth: int) -> None:
        self._thread.depth = depth

    def _axis(self, group: str) -> str:
        return self._axes.get(group, "subgroup")

    def _objects(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    def _note(self, kind: str, axis: str, said: str | None, ranks: int, dtype: str, size: int) -> None:
        """Add one call to its row; `said` is None where it was not our own."""
        purpose = said if said is not None else self._inferred_purpose(kind, axis, dtype)
        if said is None:
            self.library_calls.append(Call(kind, axis, purpose))
        place = LedgerKey(kind, axis, purpose, ranks, dtype, self._phase(purpose), self._source)
        row = self._rows.setdefault(place, [0, 0])
        row[:] = [row[0] + 1, row[1] + size]

    def _inferred_purpose(self, kind: str, axis: str, dtype: str) -> str:
        """Purpose of a collective in PyTorch's wrappers: mostly the reduction of gradients."""
        if not self._infers:
            return ""
        if dtype == "int32":
            return UNUSED  # DDP's map of parameters
        if axis == PP and kind == "permute":
            return ACTIVATIONS_AND_GRADIENTS  # its batches of messages do not say which
        # FSDP2 gathers inside of the loss's backward, too: that is no part of the loss.
        if self._module.endswith(".loss") and (axis == TP or kind == "all_reduce"):
            return LOSS
        if axis == TP and self._modules.are_in_backward and not self._modules.run_again:
            return REPLICATED_GRADIENTS if is_of_fsdp(sys._getframe(1)) else ACTIVATION_GRADIENTS
        if axis == TP:
            return ACTIVATIONS if self._module else REPLICATED_GRADIENTS
        is_of_parameters = axis == DP_SHARD and kind in ("all_gather", "broadcast")
        return PARAMETERS if is_of_parameters else GRADIENTS

    def _phase(self, purpose: str) -> str:
        if self._modules.are_in_backward:
            return "backward"
        if self.is_updating or is_of_optimizer(sys._getframe(1)):
            return "update"
        return PHASES.get(purpose, "forward" if self._module else "")

    @property
    def _module(self) -> str:
        """The innermost module that is running."""
        return self._modules.innermost

    @property
    def _source(self) -> str:
        """The innermost line outside of PyTorch, and the innermost module."""
        return ": ".join(part for part in (line_of(sys._getframe(1)), self._module) if part)


class RankLedger(NamedTuple):
    """Notes of a `LedgerMode` on one rank."""

    rows: list[Communication]
    seen: dict[str, int]
    own: dict[str, int]
    problems: tuple[str, ...] = ()


def of_all_ranks(ranks: Sequence[RankLedger], *, stages: Sequence[int], counts_own: bool) -> Ledger:
    """One ledger of all ranks: of each place in each stage that of the rank that has most of it.

    Args:
        ranks: in the order of the mesh.
        stages: of each its rank of the pipeline.
        counts_own: all calls are our own, so that the dispatcher must have seen the same bytes.
    """
    most: dict[Communication, Communication] = {}
    for rank, ledger in enumerate(ranks):
        for row in ledger.rows:
            mine = replace(row, stage=stages[rank])
            place = replace(mine, calls=0, bytes=0, wire_bytes=0)
            most[place] = max(most.get(place, mine), mine, key=lambda row: (row.bytes, row.calls))
    rows = sorted(most.values(), key=lambda row: row.stage)
    problems = [problem for ledger in ranks for problem in ledger.problems]
    return Ledger(
        rows=rows, problems=list(dict.fromkeys(problems + (_disagreements(ranks) if counts_own else [])))
    )


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
