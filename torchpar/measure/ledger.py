"""Communication of a step, read from PyTorch's dispatcher: it sees our own calls and DDP's C++ alike.

Patching torch.distributed would miss what the library wrappers send from C++.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compare.contract.axes import DP_SHARD, PP, TP
from compare.contract.communication import ACTIVATIONS, ACTIVATIONS_AND_GRADIENTS, PARAMETERS, Communication
from torchpar.comm.collectives import Axis
from torchpar.comm.counter import Call, Traffic

# c10d and functional names without punctuation -> the ledger's kind
KINDS = {
    "allreduce": "all_reduce",
    "allreducecoalesced": "all_reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "allgatherbase": "all_gather",
    "allgatherintotensor": "all_gather",
    "allgatherintotensorcoalesced": "all_gather",
    "reducescatter": "reduce_scatter",
    "reducescatterbase": "reduce_scatter",
    "reducescattertensor": "reduce_scatter",
    "reducescattertensorcoalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoallbase": "all_to_all",
    "alltoallsingle": "all_to_all",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "permute",
}
# What PyTorch's wrappers use a collective for, where that is not to reduce gradients: inferred. Along tp
# backward calls the same operators as forward, so that gradients of activations count as activations.
_WRAPPERS = {
    (DP_SHARD, "all_gather"): PARAMETERS,
    (DP_SHARD, "broadcast"): PARAMETERS,
    (PP, "permute"): ACTIVATIONS_AND_GRADIENTS,
    (TP, "all_gather"): ACTIVATIONS,
    (TP, "all_reduce"): ACTIVATIONS,
    (TP, "reduce_scatter"): ACTIVATIONS,
}
_IGNORED = {"recv", "recvanysource", "waittensor", "barrier", "monitoredbarrier", "wraptensorautograd"}


class CommunicationMode(TorchDispatchMode):
    """Counts every collective while it is active.

    Args:
        axes: the mesh's axes, to name the process groups.
        own_calls: the count of our own calls, which says what a call is for while one is being made.
        default_purpose: of calls that are not our own: those of PyTorch's wrappers.

    Attributes:
        seen: the count.
        library_calls: those that are not our own, in their order.
    """

    def __init__(self, axes: list[Axis], *, own_calls: Traffic, default_purpose: str):
        super().__init__()
        self.seen = Traffic()
        self.library_calls: list[Call] = []
        self._own_calls = own_calls
        self._default_purpose = default_purpose
        self._axis_names = {str(axis.group.group_name): axis.name for axis in axes if axis.group}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor first: what it makes of the operator comes back here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._own_calls.is_paused and (seen := call_of(func, args, kwargs, result)):
            self._count(seen)
        return result

    def _count(self, seen: "SeenCall") -> None:
        assert seen.group in self._axis_names, (
            f"{seen.kind} over process group {seen.group!r}, which is no axis of the mesh"
        )
        axis = self._axis_names[seen.group]
        purpose = self._own_calls.purpose or _WRAPPERS.get((axis, seen.kind), self._default_purpose)
        call = Call(seen.kind, axis, purpose)
        self.seen.add(call, seen.bytes)
        if not self._own_calls.purpose:
            self.library_calls.append(call)


class SeenCall(NamedTuple):
    """A collective as the dispatcher sees it."""

    kind: str
    group: str
    """Name of the process group."""
    bytes: int
    """Of the full (gathered) tensor."""
    dtype: str


def call_of(func: Any, args: tuple, kwargs: dict, result: object) -> SeenCall | None:
    """What an operator communicates; None if it does not, or only takes what somebody else sends."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = func.overloadpacket.__name__.replace("_", "")
    if name in _IGNORED:
        return None
    # The full tensor is what goes in or what comes out, whichever is larger.
    size = max(_nbytes((args, kwargs)), _nbytes(result))
    if name in ("allgather", "allgatherbase", "reducescatter", "reducescatterbase"):
        size = max(_nbytes(args[0]), _nbytes(args[1]))  # both sides are arguments
    dtypes = (leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return SeenCall(
        kind=KINDS.get(name, name),
        group=_group_name((*args, *kwargs.values())),
        bytes=size,
        dtype=", ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes)),
    )


def of_the_busiest(ledgers: Iterable[list[Communication]]) -> list[Communication]:
    """One ledger of all ranks': of each kind, axis and purpose what the rank says that had the most of it.

    Only the stages of a pipeline differ: the first sends no gradients, the last no activations.
    """
    entries = [entry for ledger in ledgers for entry in ledger]
    most = {(e.kind, e.axis, e.purpose): e for e in sorted(entries, key=lambda e: (e.bytes, e.calls))}
    return [most[key] for key in sorted(most)]


def _nbytes(tree: object) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _group_name(arguments: tuple) -> str:
    """c10d operators take the group itself, functional ones its name as their last string."""
    for argument in reversed(arguments):
        if isinstance(argument, str):
            return argument
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
            return ProcessGroup.unbox(argument).group_name
    return ""
