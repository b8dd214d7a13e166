"""Collectives, each observed: only this, `process_groups` and the benchmark call torch.distributed.

An `Axis` is one mesh axis as this rank sees it. Its methods are the collectives along that axis; each
demands contiguous tensors, because gloo silently returns wrong numbers for a strided one.

Gathers and scatters cut a tensor as `chunk_slices` says: equal but for the last ones, so nothing is padded.
gloo's own reduce-scatter is an all-reduce, and its all-gather copies everything once more: on gloo sends and
a local sum, and sends straight into place, move the same bytes in a third of the time. NCCL's are fast.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
ProcessGroup = dist.ProcessGroup
# torch 2.13 deprecates the old names, 2.11 knows only them.
_gather_equal = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_equal = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
MESH = "mesh_"  # how PyTorch describes the group of a mesh axis


def chunk_slices(count: int, ranks: int) -> list[slice]:
    """The cut of each rank of `count` elements: equal but for the last ones, which may be short or empty."""
    share = -(-count // ranks)
    return [slice(min(r * share, count), min((r + 1) * share, count)) for r in range(ranks)]


class Call(NamedTuple):
    """A row of the ledger: kind, axis and purpose of its calls."""

    kind: str
    axis: str
    purpose: str


observers: list[Callable[[Call, torch.Tensor, int], AbstractContextManager]] = []
"""Each is entered around every call, on any mesh, over a gathered tensor of any shape and so many ranks. The
call is handed on inside; what was begun may end long after.
"""


@contextmanager
def unobserved() -> Generator[None]:
    """No observer is told of the collectives inside: gathers for the record are outside of a step."""
    before = observers.copy()
    observers.clear()
    try:
        yield
    finally:
        observers[:] = before


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Return once its result is there (on a GPU: for all kernels that are launched after this)."""
        ...


class _Works:
    """Several collectives as one, and what remains to be computed of their results."""

    def __init__(self, works: Sequence[Work | None], finish: Callable[[], object] = lambda: None):
        self._works, self._finish = works, finish

    def wait(self) -> None:
        for work in self._works:
            if work:
                work.wait()
        self._finish()


DONE: Work = _Works([])
"""A collective of one rank, which was done where it began."""


class Axis:
    """One mesh axis, named as in the layout, as one of its ranks sees it; of one rank it has no group."""

    def __init__(self, name: str, *, size: int, rank: int, group: ProcessGroup | None):
        self.name, self.size, self.rank, self.group = name, size, rank, group

    @classmethod
    def from_group(cls, group: ProcessGroup) -> "Axis":
        """The axis over a process group, named world, subgroup, or after its dimension of a DeviceMesh."""
        name = "world" if group == dist.group.WORLD else "subgroup"
        if group.group_desc.startswith(MESH):
            name = group.group_desc.removeprefix(MESH)
        return cls(name, size=dist.get_world_size(group), rank=dist.get_rank(group), group=group)

    def all_reduce(self, tensor: torch.Tensor, *, purpose: str = "") -> None:
        """Replace `tensor`, any shape, by its sum over the axis."""
        self.start_all_reduce(tensor, purpose=purpose).wait()

    def start_all_reduce(self, tensor: torch.Tensor, *, purpose: str = "") -> Work:
        """Begin `all_reduce`; `tensor` is valid after `wait()` on the result."""
        if self.size == 1:
            return DONE
        with self._observed("all_reduce", tensor, purpose):
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
        assert work is not None
        return work

    def broadcast(self, tensor: torch.Tensor, *, purpose: str = "") -> None:
        """Replace `tensor`, any shape, by that of the axis's first rank."""
        if self.size > 1:
            with self._observed("broadcast", tensor, purpose):
                dist.broadcast(tensor, group=self.group, group_src=0)

    def all_gather(self, full: torch.Tensor, piece: torch.Tensor, *, purpose: str = "") -> None:
        """Fill `full` (n,), cut as `chunk_slices(n, size)` says, with every rank's shard in order.

        This rank's `piece` may be its place in `full` itself, which saves a copy.
        """
        self.start_all_gather(full, piece, purpose=purpose).wait()

    def start_all_gather(self, full: torch.Tensor, piece: torch.Tensor, *, purpose: str = "") -> Work:
        """Begin `all_gather`; neither tensor may be touched before `wait()` on the result."""
        with self._observed("all_gather", full, purpose, piece):
            slots = [full[cut] for cut in chunk_slices(len(full), self.size)]
            if self.group is None or len(full) == 0:
                if self.size == 1:
                    full.copy_(piece)
                return DONE
            if self._sends_to_each:
                if piece.data_ptr() != slots[self.rank].data_ptr():
                    slots[self.rank].copy_(piece)
                return _Works(self._exchange(slots, [piece] * self.size))
            if len(full) % self.size == 0:
                return _gather_equal(full, piece, group=self.group, async_op=True)
            # NCCL gathers equal pieces only: pad the last ones on the way.
            count = len(slots[0])
            padded = full.new_empty(self.size * count)
            work = _gather_equal(padded, _pad(piece, count), group=self.group, async_op=True)
            return _Works([work], lambda: full.copy_(padded[: len(full)]))

    def reduce_scatter(self, piece: torch.Tensor, full: torch.Tensor, *, purpose: str = "") -> None:
        """Fill `piece` with this rank's shard of the sum of every rank's `full` (n,); see `all_gather`."""
        self.start_reduce_scatter(piece, full, purpose=purpose).wait()

    def start_reduce_scatter(self, piece: torch.Tensor, full: torch.Tensor, *, purpose: str = "") -> Work:
        """Begin `reduce_scatter`; neither tensor may be touched before `wait()`, which may compute.

        `piece` may be its place in `full` itself.
        """
        with self._observed("reduce_scatter", full, purpose, piece):
            parts = [full[cut] for cut in chunk_slices(len(full), self.size)]
            if self.size == 1 or len(full) == 0:
                piece.copy_(full)
                return DONE
            if self._sends_to_each:
                arrived = full.new_empty(self.size, len(piece))
                works, own = self._exchange(list(arrived), parts), parts[self.rank]

                def add_up() -> None:
                    total = own
                    for step in range(1, self.size):
                        total = torch.add(total, arrived[self.rank - step], out=piece)

                return _Works(works, add_up)
            if len(full) % self.size == 0:
                return _reduce_scatter_equal(piece, full, group=self.group, async_op=True)
            count = len(parts[0])
            padded, mine = _pad(full, self.size * count), full.new_empty(count)
            work = _reduce_scatter_equal(mine, padded, group=self.group, async_op=True)
            return _Works([work], lambda: piece.copy_(mine[: len(piece)]))

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        *,
        purpose: str = "",
        counts: tuple[list[int] | None, list[int] | None] = (None, None),
    ) -> None:
        """Send `sent[r]` to rank r, and receive `received[r]` from it; both (R, ...), R ranks.

        With `counts` so many rows are received from each rank, and so many sent to it.
        """
        with self._observed("all_to_all", sent, purpose, received):
            if self.group is None:
                received.copy_(sent)
            else:
                dist.all_to_all_single(received, sent, *counts, group=self.group)

    def all_reduce_copy(self, x: torch.Tensor, *, purpose: str) -> torch.Tensor:
        """The sum of every rank's x, any shape, in a new tensor: autograd may have saved x."""
        total = x.clone(memory_format=torch.contiguous_format)
        self.all_reduce(total, purpose=purpose)
        return total

    def all_gather_dim(self, x: torch.Tensor, dim: int, *, purpose: str) -> torch.Tensor:
        """Every rank's x, (..., d, ...), concatenated along `dim`: (..., R d, ...)."""
        full = x.new_empty((self.size, *x.shape))
        self.all_gather(full.view(-1), x.contiguous().view(-1), purpose=purpose)
        return torch.cat(full.unbind(), dim=dim)

    def reduce_scatter_dim(self, x: torch.Tensor, dim: int, *, purpose: str) -> torch.Tensor:
        """This rank's chunk along `dim` of the sum of every rank's x: (..., d, ...) to (..., d / R, ...)."""
        stacked = torch.stack(x.chunk(self.size, dim=dim))
        mine = torch.empty_like(stacked[0])
        self.reduce_scatter(mine.view(-1), stacked.view(-1), purpose=purpose)
        return mine

    def all_to_all_dims(self, x: torch.Tensor, *, split: int, join: int, purpose: str) -> torch.Tensor:
        """Send chunk r of x along dim `split` to rank r, and concatenate the received chunks along `join`."""
        sent = torch.stack(x.chunk(self.size, dim=split))
        received = torch.empty_like(sent)
        self.all_to_all(received, sent, purpose=purpose)
        return torch.cat(received.unbind(), dim=join)

    def start_send(self, tensor: torch.Tensor, *, to: int, purpose: str = "") -> Work:
        """Begin to send `tensor`, any shape, to rank `to` of the axis; leave it alone until `wait()`.

        The messages of two ranks meet by their order alone: NCCL knows no tags.
        """
        with self._observed("permute", tensor, purpose):
            work = dist.isend(tensor, group=self.group, group_dst=to)
        assert work is not None
        return work

    def start_receive(self, tensor: torch.Tensor, *, source: int) -> Work:
        """Begin to receive into `tensor`, any shape, from rank `source`. The sender counts the message."""
        work = dist.irecv(tensor, group=self.group, group_src=source)
        assert work is not None
        return work

    def start_shift(self, received: torch.Tensor, sent: torch.Tensor, *, purpose: str = "") -> Work:
        """Begin to send to the next rank of a ring, and to receive from the one before: tensors of any shape.

        Leave both alone, and keep them, until `wait()`.
        """
        to, source = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        with self._observed("permute", sent, purpose, received):
            ends = [
                dist.P2POp(dist.isend, sent, group=self.group, group_peer=to),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=source),
            ]
            return _Works(dist.batch_isend_irecv(ends))

    def all_gather_objects(self, value: T) -> list[T]:
        """Every rank's small picklable value, in order. It is never part of a step."""
        if self.size == 1:
            return [value]
        values: list = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    @property
    def _sends_to_each(self) -> bool:
        return dist.get_backend(self.group) != "nccl"

    def _exchange(self, slots: list[torch.Tensor], parts: list[torch.Tensor]) -> list[Work | None]:
        """Send each other rank its part, and receive what it has for this one into its slot."""
        works: list[Work | None] = []
        for step in range(1, self.size):  # every rank begins with another neighbour
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            if len(parts[to]):
                works.append(dist.isend(parts[to], group=self.group, group_dst=to))
            if len(slots[source]):
                works.append(dist.irecv(slots[source], group=self.group, group_src=source))
        return works

    @contextmanager
    def _observed(
        self, kind: str, full: torch.Tensor, purpose: str, *others: torch.Tensor
    ) -> Generator[None]:
        for tensor in (full, *others):
            if not tensor.is_contiguous():
                raise ValueError(
                    f"{kind} of a non-contiguous tensor {tuple(tensor.shape)}, strides {tensor.stride()}"
                )
        with ExitStack() as stack:
            for observer in observers if self.size > 1 else ():
                stack.enter_context(observer(Call(kind, self.name, purpose), full, self.size))
            yield


def _pad(tensor: torch.Tensor, count: int) -> torch.Tensor:
    padded = tensor.new_zeros(count)
    padded[: len(tensor)] = tensor
    return padded
