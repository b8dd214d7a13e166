"""Types of torch-manual's collectives for spmd_types, which checks them on one process, without ranks.

A tensor has a type along each mesh axis, and so has its gradient:

    R   replicated: equal on all ranks    P, a part of a sum that is to be made
    I   invariant: equal on all ranks     I, equal, too
    V   varying: each rank has its own    V
    P   partial: a part of a sum          R

Megatron's f and g, and their kin under sequence parallelism, are the casts between them. What is sent by
`dist.all_reduce`, `all_gather` and `reduce_scatter` in place, spmd_types types by itself; sends and receives
it does not see.
"""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types import I, P, R, S, V, rules
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchpar.comm.collectives import Axis
from torchpar.manual import megatron

RANKS = 4
Cast = Callable[..., Any]


def _cast(kind: Cast, *, src: Any, dst: Any) -> Cast:
    def cast(x: torch.Tensor, group: Any, along: int | None, *, is_varying: bool) -> Any:
        if src is P and is_varying:  # each rank's product of parts: that it is a part of a sum is said here
            return kind(x, group, src=V, dst=_part(dst, along))
        return kind(x, group, src=_part(src, along), dst=_part(dst, along))

    return cast


def _part(one: Any, along: int | None) -> Any:
    """What varies is a part of the whole along a dim."""
    return S(along) if one is V else one


CASTS = {
    ("_same", "_all_reduce"): _cast(rules.convert, src=I, dst=R),
    ("_all_reduce", "_same"): _cast(rules.all_reduce, src=P, dst=I),
    ("_part", "_all_gather"): _cast(rules.convert, src=I, dst=V),
    ("_all_gather", "_reduce_scatter"): _cast(rules.all_gather, src=V, dst=R),
    ("_reduce_scatter", "_all_gather"): _cast(rules.reduce_scatter, src=P, dst=V),
}
"""By what a mapping of `megatron` does forward and backward."""


def _of_mapping(*, x: torch.Tensor, axis: Axis, dim: int | None, forward: Any, backward: Any) -> Any:
    """The type of what a mapping returns."""
    cast = CASTS[forward.__name__, backward.__name__]
    return cast(x, axis.group, dim, is_varying=type_of(x, axis) is V)


def _of_cross_entropy(loss_N: torch.Tensor, *, logits_NV: torch.Tensor, targets_N: Any, axis: Axis) -> None:
    """A loss that is equal on all ranks, of logits that are not."""
    rules.ignore(targets_N)
    typed(logits_NV, axis, V)
    typed(loss_N, axis, I)


@contextmanager
def one_rank(name: str, ranks: int = RANKS) -> Generator[Axis]:
    """An axis of several ranks of which only this one runs; what it sends goes nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    hooks = ((megatron._Mapping, _of_mapping), (megatron._CrossEntropy, _of_cross_entropy))
    try:
        mesh = DeviceMesh("cpu", torch.arange(ranks), mesh_dim_names=(name,))
        with ExitStack() as stack:
            stack.enter_context(spmd.set_current_mesh(mesh))
            for function, hook in hooks:
                stack.enter_context(patch.object(function, "spmd_typecheck", staticmethod(hook), create=True))
            yield Axis(name, size=ranks, rank=0, group=mesh.get_group(name))
    finally:
        dist.destroy_process_group()


def type_of(x: Any, axis: Axis) -> Any:
    """R, I, V or P."""
    return spmd.get_axis_local_type(x, axis.group)


def typed(x: torch.Tensor, axis: Axis, to: Any) -> torch.Tensor:
    """x, which is of this type from now on, or has been; SpmdTypeError if it is of another one."""
    return spmd.assert_type(x, {axis.group: to})
