"""What an operator of PyTorch communicates, as its dispatcher sees it: our own calls and DDP's C++ alike.

Patching torch.distributed would miss what the library wrappers send from C++.
"""

from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

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
_IGNORED = {"recv", "recvanysource", "waittensor", "barrier", "monitoredbarrier", "wraptensorautograd"}


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
