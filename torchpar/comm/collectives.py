"""Collectives along a mesh axis. Only this file, `process_groups` and the benchmark call torch.distributed.

An `Axis` is one mesh axis as one rank sees it, and its methods are the collectives. Each call is observed.
Each requires contiguous tensors, because gloo returns wrong numbers for a strided one and raises nothing.

Gathers and scatters divide a tensor by `chunk_slices`, so shards may be uneven. gloo's own reduce-scatter is
an all-reduce, and its all-gather copies all tensors once more. Sends straight into place, with a local sum,
move the same bytes in a third of the time. On NCCL its own collectives are used.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fractions import Fraction
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from torchpar.comm.gloo import is_gloo
from torchpar.comm.one_operator import AXES, as_one_operator

T = TypeVar("T")
ProcessGroup = dist.ProcessGroup
# The names of torch 2.13, or the names of 2.11.
gather_equal = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_equal = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
MESH = "mesh_"  # in PyTorch's description of the group of a mesh axis


def chunk_slices(count: int, ranks: int) -> list[slice]:
    """Each rank's slice of `count` elements. All are equal, except that the last may be short or empty."""
    share = -(-count // ranks)
    return [slice(min(r * share, count), min((r + 1) * share, count)) for r in range(ranks)]


def _scaled(shape: Sequence[int], factors: Mapping[int, Fraction]) -> list[int]:
    return [int(size * factors.get(dim, 1)) for dim, size in enumerate(shape)]


class Call(NamedTuple):
    """The record of a call in the ledger."""

    kind: str
    axis: str
    purpose: str


observers: list[Callable[[Call, torch.Tensor, int], AbstractContextManager]] = []
"""Contexts entered around the start of every call, with the gathered tensor and the number of ranks."""


@contextmanager
def unobserved() -> Generator[None]:
    """Do not observe the calls inside, such as gathers for the record, which are outside of a step."""
    before = observers.copy()
    observers.clear()
    try:
        yield
    finally:
        observers[:] = before


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Wait for the result. On a GPU the kernels launched after this wait, and the host does not."""
        ...


class Works:
    """Several collectives as one, and a computation on their results.

    Attributes:
        call: what was started, of a hop.
    """

    def __init__(
        self,
        works: Sequence[Work | None],
        finish: Callable[[], object] = lambda: None,
        call: Call | None = None,
    ):
        self._works, self._finish, self.call = works, finish, call

    def wait(self) -> None:
        for work in self._works:
            if work:
                work.wait()
        self._finish()


DONE: Work = Works([])
"""A finished collective (one rank)."""


class Axis:
    """A mesh axis as one of its ranks sees it. An axis of one rank has no group."""

    def __init__(self, name: str, *, size: int, rank: int, group: ProcessGroup | None):
        self.name, self.size, self.rank, self.group = name, size, rank, group
        self.key = f"{name} of {group.group_name}" if group else name
        AXES[self.key] = self

    @classmethod
    def from_group(cls, group: ProcessGroup) -> "Axis":
        """The axis over a process group, named world, subgroup, or after its dimension of a DeviceMesh."""
        name = "world" if group == dist.group.WORLD else "subgroup"
        if group.group_desc.startswith(MESH):
            name = group.group_desc.removeprefix(MESH)
        return cls(name, size=dist.get_world_size(group), rank=dist.get_rank(group), group=group)

    # In place. Each may be started first, and then its tensors must not be touched until `wait()` returns.
    # With async_op False, NCCL's kernel runs on the stream that computes: no event, and no tensor is kept.

    def all_reduce(self, tensor: torch.Tensor, *, purpose: str = "") -> None:
        """Replace `tensor`, any shape, by its sum over the ranks."""
        self.start_all_reduce(tensor, purpose=purpose, async_op=False).wait()

    def start_all_reduce(self, tensor: torch.Tensor, *, purpose: str = "", async_op: bool = True) -> Work:
        """Start `all_reduce`."""
        if self.size == 1:
            return DONE
        with self._observed("all_reduce", tensor, purpose):
            return dist.all_reduce(tensor, group=self.group, async_op=async_op) or DONE

    def broadcast(self, tensor: torch.Tensor, *, purpose: str = "") -> None:
        """Replace `tensor`, any shape, by the tensor of the first rank."""
        if self.size > 1:
            with self._observed("broadcast", tensor, purpose):
                dist.broadcast(tensor, group=self.group, group_src=0)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, *, purpose: str = "") -> None:
        """Fill `full` (n,) with every rank's shard, divided by `chunk_slices(n, size)`.

        This rank's `shard` may be its slice of `full` itself, which saves a copy.
        """
        self.start_all_gather(full, shard, purpose=purpose, async_op=False).wait()

    def start_all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, *, purpose: str = "", async_op: bool = True
    ) -> Work:
        """Start `all_gather`."""
        with self._observed("all_gather", full, purpose, shard):
            if self.size == 1 or len(full) == 0:
                full.copy_(shard)
                return DONE
            if self._sends(full):
                return _gather_by_sends(self, full, shard)
            return _gather_by_nccl(self, full, shard, async_op=async_op)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, *, purpose: str = "") -> None:
        """Fill `shard` with this rank's slice of the sum of every rank's `full` (n,); see `all_gather`."""
        self.start_reduce_scatter(shard, full, purpose=purpose, async_op=False).wait()

    def start_reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, *, purpose: str = "", async_op: bool = True
    ) -> Work:
        """Start `reduce_scatter`. `shard` may be this rank's slice of `full`. `wait()` may compute."""
        with self._observed("reduce_scatter", full, purpose, shard):
            if self.size == 1 or len(full) == 0:
                shard.copy_(full)
                return DONE
            if self._sends(full):
                return _reduce_scatter_by_sends(self, shard, full)
            return _reduce_scatter_by_nccl(self, shard, full, async_op=async_op)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        *,
        purpose: str = "",
        counts: tuple[list[int] | None, list[int] | None] = (None, None),
    ) -> None:
        """Send `sent[r]` to rank r, and receive `received[r]` from it; both (R, ...), R ranks.

        With `counts`, the numbers of rows received from each rank and sent to each rank, both are (rows,
        ...).
        """
        with self._observed("all_to_all", sent, purpose, received):
            if self.size == 1:
                received.copy_(sent)
            else:
                dist.all_to_all_single(received, sent, *counts, group=self.group)

    def start_send(self, tensor: torch.Tensor, *, to: int, purpose: str = "") -> Work:
        """Start to send `tensor`, any shape, to rank `to`. Two ranks match their messages by order alone."""
        with self._observed("permute", tensor, purpose):
            work = dist.isend(tensor, group=self.group, group_dst=to)
        assert work is not None
        return work

    def start_receive(self, tensor: torch.Tensor, *, source: int) -> Work:
        """Start to receive into `tensor`, any shape, from rank `source`. The sender's call is observed."""
        work = dist.irecv(tensor, group=self.group, group_src=source)
        assert work is not None
        return work

    def start_shift(self, received: torch.Tensor, sent: torch.Tensor, *, purpose: str = "") -> Work:
        """Start to send to the next rank of a ring and to receive from the previous one, any shapes."""
        to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        with self._observed("permute", sent, purpose, received):
            ends = [
                dist.P2POp(dist.isend, sent, group=self.group, group_peer=to),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=source),
            ]
            return Works(dist.batch_isend_irecv(ends), call=Call("permute", self.name, purpose))

    # From tensors to new tensors, along any dim.

    @as_one_operator(lambda shape, ranks: shape)
    def all_reduce_copy(self, x: torch.Tensor, *, purpose: str) -> torch.Tensor:
        """The sum of every rank's x, any shape, in a new tensor: autograd may have saved x."""
        total = x.clone(memory_format=torch.contiguous_format)
        self.all_reduce(total, purpose=purpose)
        return total

    @as_one_operator(lambda shape, ranks, dim: _scaled(shape, {dim: Fraction(ranks)}))
    def all_gather_dim(self, x: torch.Tensor, dim: int, *, purpose: str) -> torch.Tensor:
        """Every rank's x, (..., d, ...), concatenated along `dim`: (..., R d, ...)."""
        full = x.new_empty((self.size, *x.shape))
        self.all_gather(full.view(-1), x.contiguous().view(-1), purpose=purpose)
        if math.prod(x.shape[:dim]) == 1:  # the chunks are in their places
            return full.view(*x.shape[:dim], -1, *x.shape[dim + 1 :])
        return torch.cat(full.unbind(), dim=dim)

    @as_one_operator(lambda shape, ranks, dim: _scaled(shape, {dim: Fraction(1, ranks)}))
    def reduce_scatter_dim(self, x: torch.Tensor, dim: int, *, purpose: str) -> torch.Tensor:
        """This rank's chunk along `dim` of the sum of every rank's x: (..., d, ...) to (..., d / R, ...)."""
        chunks, is_stacked = x.chunk(self.size, dim=dim), math.prod(x.shape[:dim]) == 1
        stacked = x.contiguous() if is_stacked else torch.stack(chunks)
        mine = torch.empty_like(chunks[0], memory_format=torch.contiguous_format)
        self.reduce_scatter(mine.view(-1), stacked.view(-1), purpose=purpose)
        return mine

    @as_one_operator(
        lambda shape, ranks, split, join: _scaled(shape, {split: Fraction(1, ranks), join: Fraction(ranks)})
    )
    def all_to_all_dims(self, x: torch.Tensor, *, split: int, join: int, purpose: str) -> torch.Tensor:
        """Send chunk r of x along dim `split` to rank r, and concatenate the received chunks along `join`."""
        sent = torch.stack(x.chunk(self.size, dim=split))
        received = torch.empty_like(sent)
        self.all_to_all(received, sent, purpose=purpose)
        return torch.cat(received.unbind(), dim=join)

    def all_gather_objects(self, value: T) -> list[T]:
        """Every rank's small picklable value, in order. Not part of a step, and not observed."""
        if self.size == 1:
            return [value]
        values: list = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _sends(self, tensor: torch.Tensor) -> bool:
        """True if gathers and scatters are sends: gloo cannot send from the memory of a GPU."""
        return is_gloo(self.group) and tensor.device.type == "cpu"

    @contextmanager
    def _observed(
        self, kind: str, full: torch.Tensor, purpose: str, *others: torch.Tensor
    ) -> Generator[None]:
        for tensor in (full, *others):
            if not tensor.is_contiguous():
                raise ValueError(
                    f"{kind} of a non-contiguous tensor {tuple(tensor.shape)}, strides {tensor.stride()}: "
                    "call contiguous() first"
                )
        with ExitStack() as stack:
            for observer in observers if self.size > 1 else ():
                stack.enter_context(observer(Call(kind, self.name, purpose), full, self.size))
            yield


# gloo: each rank sends every other rank its slice, straight into place.


def _gather_by_sends(axis: Axis, full: torch.Tensor, shard: torch.Tensor) -> Work:
    slots = [full[chunk] for chunk in chunk_slices(len(full), axis.size)]
    if shard.data_ptr() != slots[axis.rank].data_ptr():
        slots[axis.rank].copy_(shard)
    return Works(_exchange(axis, slots, [shard] * axis.size))


def _reduce_scatter_by_sends(axis: Axis, shard: torch.Tensor, full: torch.Tensor) -> Work:
    chunks = [full[chunk] for chunk in chunk_slices(len(full), axis.size)]
    arrived = full.new_empty(axis.size, len(shard))
    works = _exchange(axis, list(arrived), chunks)

    def add_up() -> None:
        total = chunks[axis.rank]
        for step in range(1, axis.size):
            total = torch.add(total, arrived[axis.rank - step], out=shard)

    return Works(works, add_up)


def _exchange(axis: Axis, slots: list[torch.Tensor], chunks: list[torch.Tensor]) -> list[Work | None]:
    """Send chunk r to each other rank r, and receive its chunk into slot r."""
    works: list[Work | None] = []
    for step in range(1, axis.size):  # every rank begins with another neighbour
        to, source = (axis.rank + step) % axis.size, (axis.rank - step) % axis.size
        if len(chunks[to]):
            works.append(dist.isend(chunks[to], group=axis.group, group_dst=to))
        if len(slots[source]):
            works.append(dist.irecv(slots[source], group=axis.group, group_src=source))
    return works


# NCCL requires equal slices: uneven ones are padded in a copy.


def _gather_by_nccl(axis: Axis, full: torch.Tensor, shard: torch.Tensor, *, async_op: bool) -> Work:
    if len(full) % axis.size == 0:
        return gather_equal(full, shard, group=axis.group, async_op=async_op) or DONE
    count = -(-len(full) // axis.size)
    padded = full.new_empty(axis.size * count)
    work = gather_equal(padded, _pad(shard, count), group=axis.group, async_op=async_op)
    return Works([work], lambda: full.copy_(padded[: len(full)]))


def _reduce_scatter_by_nccl(axis: Axis, shard: torch.Tensor, full: torch.Tensor, *, async_op: bool) -> Work:
    if len(full) % axis.size == 0:
        return reduce_scatter_equal(shard, full, group=axis.group, async_op=async_op) or DONE
    count = -(-len(full) // axis.size)
    mine = full.new_empty(count)
    work = reduce_scatter_equal(mine, _pad(full, axis.size * count), group=axis.group, async_op=async_op)
    return Works([work], lambda: shard.copy_(mine[: len(shard)]))


def _pad(tensor: torch.Tensor, count: int) -> torch.Tensor:
    padded = tensor.new_zeros(count)
    padded[: len(tensor)] = tensor
    return padded
