"""Time collectives between ranks: PyTorch's stock operation, and our way over the same backend."""

import functools
import socket
from pathlib import Path

import torch
import torch.distributed as dist

from compare.side import collective_bench as bench
from compare.side.collective_bench import CollectiveCase, CollectiveRequest, CollectiveRow
from compare.side.host_facts import host_names
from compare.system.facts import versions
from compare.system.json_files import write_json
from torchpar.comm import process_groups
from torchpar.comm.collectives import Axis, _gather_equal, _reduce_scatter_equal
from torchpar.comm.mesh import PACKAGES, device_kind
from torchpar.launch import Rank
from torchpar.run import join_ranks, now

IN_PLACE = ("all_reduce", "broadcast")


def time_as_rank(rank: Rank, *, request: CollectiveRequest, folder: Path) -> None:
    """Time every case as one of the ranks; the first one writes the times. ExperimentError: hosts differ."""
    torch.set_num_threads(1)
    device, world = join_ranks(rank, request.platform), Axis.from_group(process_groups.world_group())
    rows = []
    axes = {way: axis_of(way, rank.rank, ranks=request.ranks) for way in request.implementations}
    for number, case in enumerate(request.cases):
        for way, axis in axes.items():
            rank.at(number, "synchronisation")
            rows.append(time_case(way, axis, case, device=device, row_s=request.row_s))
    places = world.all_gather_objects((socket.gethostname(), rank.local_rank))
    if rank.rank == 0:
        times = bench.CollectiveTimes(
            rows=rows,
            device_kind=device_kind(device),
            versions=versions(PACKAGES),
            threads="1 per rank",
            hosts=host_names(places),
        )
        write_json(folder / bench.TIMES, times)
    process_groups.leave_group()


def axis_of(way: str, rank: int, *, ranks: int) -> Axis:
    """All ranks, for one way; PyTorch's own operations on gloo get a group as PyTorch makes it."""
    group = dist.new_group() if way == "gloo" else process_groups.world_group()
    return Axis("world", size=ranks, rank=rank, group=group)


def time_case(
    way: str, axis: Axis, case: CollectiveCase, *, device: torch.device, row_s: float
) -> CollectiveRow:
    """Time one collective of one size along `axis`, then do it once more and look at what it gave."""
    kind, ranks = case.kind, axis.size
    count = bench.elements(kind, case.size, ranks)
    given = torch.from_numpy(bench.sent(kind, axis.rank, ranks=ranks, count=count)).to(device)
    wanted = torch.from_numpy(bench.expected(kind, axis.rank, ranks=ranks, count=count)).to(device)
    result = torch.zeros_like(wanted)  # sums over and over in place stay finite
    call = functools.partial((OWN if way == bench.OURS else STOCK)[kind], axis, given, result)
    seconds = bench.measure(
        call,
        wait=functools.partial(now, device),  # on a GPU calls return before they are done
        slowest=lambda value: max(axis.all_gather_objects(value)),
        row_s=row_s,
    )
    result.copy_(given) if kind in IN_PLACE else result.fill_(-1)
    call()
    now(device)
    wrong = sum(axis.all_gather_objects(int((result != wanted).sum())))
    return bench.make_row(way, case, ranks=ranks, seconds=seconds, wrong=wrong)


def _shift(axis: Axis, given: torch.Tensor, result: torch.Tensor) -> None:
    """Send to the next rank of the ring, and receive from the one before, as torch-manual's pipeline does.

    NCCL has no tags and goes by the order: were all to send first, each would wait for the next.
    """
    send = functools.partial(axis.start_send, given, to=(axis.rank + 1) % axis.size)
    receive = functools.partial(axis.start_receive, result, source=(axis.rank - 1) % axis.size)
    for work in [begin() for begin in ((send, receive) if axis.rank % 2 == 0 else (receive, send))]:
        work.wait()


def _stock_shift(axis: Axis, given: torch.Tensor, result: torch.Tensor) -> None:
    to, source = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    messages = [
        dist.P2POp(dist.isend, given, group=axis.group, group_peer=to),
        dist.P2POp(dist.irecv, result, group=axis.group, group_peer=source),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()


OWN = {
    "all_reduce": lambda axis, given, result: axis.all_reduce(result),
    "broadcast": lambda axis, given, result: axis.broadcast(result),
    "all_gather": lambda axis, given, result: axis.all_gather(result, given),
    "reduce_scatter": lambda axis, given, result: axis.reduce_scatter(result, given),
    "all_to_all": lambda axis, given, result: axis.all_to_all(result, given),
    "permute": _shift,
}
"""From `given` (n,) into `result` (n,), or on `result` in place."""
STOCK = {
    "all_reduce": lambda axis, given, result: dist.all_reduce(result, group=axis.group),
    "broadcast": lambda axis, given, result: dist.broadcast(result, group=axis.group, group_src=0),
    "all_gather": lambda axis, given, result: _gather_equal(result, given, group=axis.group),
    "reduce_scatter": lambda axis, given, result: _reduce_scatter_equal(result, given, group=axis.group),
    "all_to_all": lambda axis, given, result: dist.all_to_all_single(result, given, group=axis.group),
    "permute": _stock_shift,
}
