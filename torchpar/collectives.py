"""The one door to torch.distributed: process groups, collectives, and a count of what passed through.

An `Axis` is one mesh axis as this rank sees it. Its methods are the collectives along that axis; each
demands contiguous tensors, because gloo silently returns wrong numbers for a strided one.
"""

import datetime
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from compare.contract.record import Communication, ring_wire_bytes

T = TypeVar("T")
ProcessGroup = dist.ProcessGroup
Work = dist.Work


class Call(NamedTuple):
    """What calls to a collective have in common in a ledger."""

    kind: str
    axis: str
    purpose: str


class Traffic:
    """Counts of the collectives that passed through the axes of one mesh.

    Attributes:
        calls, bytes: by kind, axis and purpose; bytes are those of the full (gathered) tensors.
        purpose: of the call being made right now, "" outside the door: what `ledger.py` asks for.
    """

    def __init__(self):
        self.calls: dict[Call, int] = defaultdict(int)
        self.bytes: dict[Call, int] = defaultdict(int)
        self.purpose = ""

    def add(self, call: Call, size: int) -> None:
        """Count one call over `size` logical bytes."""
        self.calls[call] += 1
        self.bytes[call] += size

    def clear(self) -> None:
        """Forget everything counted so far."""
        self.calls.clear()
        self.bytes.clear()

    def ledger(self, sizes: dict[str, int]) -> list[Communication]:
        """What was counted, as the record wants it. `sizes`: the number of ranks along each axis."""
        return [
            Communication(
                kind=call.kind,
                axis=call.axis,
                purpose=call.purpose,
                calls=calls,
                bytes=self.bytes[call],
                wire_bytes=ring_wire_bytes(call.kind, self.bytes[call], sizes[call.axis]),
            )
            for call, calls in sorted(self.calls.items())
        ]


class Axis:
    """One mesh axis, as one of its ranks sees it.

    Args:
        name: as in the layout, such as dp_replicate.
        size: ranks along it.
        rank: this rank's place along it.
        group: the process group; None where size is 1.
        traffic: where calls are counted.
    """

    def __init__(
        self, name: str, *, size: int, rank: int, group: ProcessGroup | None, traffic: Traffic | None = None
    ):
        self.name = name
        self.size = size
        self.rank = rank
        self.group = group
        self.traffic = Traffic() if traffic is None else traffic

    @classmethod
    def of(cls, group: "Axis | ProcessGroup | None") -> "Axis":
        """An axis as it is, or one over a process group, or (None) over all ranks."""
        if isinstance(group, Axis):
            return group
        if not dist.is_initialized():
            raise ValueError("no process group: call torch.distributed.init_process_group first")
        group = dist.group.WORLD if group is None else group
        assert group is not None
        return cls("world", size=dist.get_world_size(group), rank=dist.get_rank(group), group=group)

    def all_reduce(self, tensor: torch.Tensor, *, purpose: str = "") -> None:
        """Replace `tensor` by its sum over the axis."""
        self.start_all_reduce(tensor, purpose=purpose).wait()

    def start_all_reduce(self, tensor: torch.Tensor, *, purpose: str = "") -> Work:
        """Begin to replace `tensor` by its sum over the axis; it is valid after `wait()` on the result."""
        with self._counted("all_reduce", tensor, purpose):
            work = dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.group, async_op=True)
        assert work is not None
        return work

    def broadcast(self, tensor: torch.Tensor, *, purpose: str = "") -> None:
        """Replace `tensor` by that of the axis's first rank."""
        with self._counted("broadcast", tensor, purpose):
            dist.broadcast(tensor, group=self.group, group_src=0)

    def all_gather_objects(self, value: T) -> list[T]:
        """Every rank's small picklable value, in order. Not counted: it is never part of a step."""
        if self.size == 1:
            return [value]
        values: list = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    @contextmanager
    def _counted(self, kind: str, full: torch.Tensor, purpose: str) -> Generator[None]:
        if not full.is_contiguous():
            raise ValueError(
                f"{kind} of a non-contiguous tensor {tuple(full.shape)}, strides {full.stride()}"
            )
        self.traffic.add(Call(kind, self.name, purpose), full.nbytes)
        self.traffic.purpose = purpose
        try:
            yield
        finally:
            self.traffic.purpose = ""


def join_group(
    *, rank: int, world_size: int, device: torch.device, rendezvous: Path | None, timeout_s: float
) -> None:
    """Join the group of all ranks. Leave it with `leave_group`.

    Args:
        rank, world_size: this process among all.
        device: NCCL for a GPU, which is then this rank's own; gloo for the CPU.
        rendezvous: a file that all ranks can reach and that did not exist; None reads MASTER_ADDR and
            MASTER_PORT, which torchrun sets.
        timeout_s: seconds that a collective may take.
    """
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(str(rendezvous), world_size) if rendezvous else None,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )


def leave_group() -> None:
    """Wait for all ranks, so that none hangs up on another. The process must end by os._exit after this.

    The group is not destroyed: if DDP's reducer outlives it, gloo's threads are joined under the GIL, and
    one of them may need the GIL to drop a dispatch mode that `ledger.py` had installed: a deadlock at exit
    (seen with torch 2.13).
    """
    dist.barrier()


def world_group() -> ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


def is_consequence(error: BaseException) -> bool:
    """Whether an error only says that another rank went away, so that the cause lies elsewhere."""
    text = str(error).lower()
    signs = ("connection closed by peer", "connection reset by peer", "gloo/transport", "broken pipe")
    return isinstance(error, dist.DistError) or any(sign in text for sign in signs)
