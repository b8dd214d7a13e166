"""What an operator of c10d communicates: our own calls and DDP's from C++ alike."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_leaves

# c10d and functional names without punctuation -> the ledger's kind
KINDS = {
    "allreduce": "all_reduce",
    "allreducecoalesced": "all_reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "allgatherbase": "all_gather",
    "allgathercoalesced": "all_gather",
    "allgatherintotensor": "all_gather",
    "allgatherintotensorcoalesced": "all_gather",
    "allgatherintotensorout": "all_gather",
    "reducescatter": "reduce_scatter",
    "reducescatterbase": "reduce_scatter",
    "reducescattertensor": "reduce_scatter",
    "reducescattertensorcoalesced": "reduce_scatter",
    "reducescattertensorout": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoallbase": "all_to_all",
    "alltoallsingle": "all_to_all",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "permute",
}
SILENT = {"recv", "recvanysource", "waittensor", "barrier", "monitoredbarrier", "wraptensorautograd"}
"""They send nothing, or their sender counts it."""
_Sizes = Callable[[int, int, int], int]
_FULL: dict[str, _Sizes] = {
    "reduce_scatter": lambda outputs, inputs, ranks: inputs,
    "all_to_all": lambda outputs, inputs, ranks: inputs,
    "gather": lambda outputs, inputs, ranks: inputs * ranks,  # only the root has the outputs
    "scatter": lambda outputs, inputs, ranks: outputs * ranks,  # only the root has the inputs
}
"""Bytes of the full tensor, from those of an operator's first two arguments. By default the first is full:
what is gathered, or what is worked on in place."""


class SeenCall(NamedTuple):
    """A collective as the dispatcher sees it."""

    kind: str
    bytes: int
    """Bytes of the full (gathered) tensor; of an all-to-all, the rank's own; if sparse, with indices."""
    dtype: str


def call_of(name: str, arguments: tuple, ranks: int) -> SeenCall | None:
    """Communication of an operator of c10d; None if it sends nothing itself.

    Raises:
        ValueError: it is none that is known, or has a tensor of unknown layout.
    """
    bare = name.replace("_", "")
    if bare in SILENT:
        return None
    if bare not in KINDS:
        raise ValueError(f"c10d::{name} is not known")
    kind = KINDS[bare]
    first, second = _nbytes(arguments[0]), _nbytes(arguments[1])
    dtypes = (leaf.dtype for leaf in _tensors(arguments))
    return SeenCall(
        kind=kind,
        bytes=_FULL[kind](first, second, ranks) if kind in _FULL else first,
        dtype=", ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes)),
    )


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _nbytes(tree: object) -> int:
    return sum(part.nbytes for tensor in _tensors(tree) for part in _parts(tensor))


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors that one is made of."""
    match tensor.layout:
        case torch.strided:
            return (tensor,)
        case torch.sparse_coo:
            return tensor._indices(), tensor._values()
    raise ValueError(f"a tensor's layout is {tensor.layout}")
