"""The times of collectives: PyTorch's stock operation, and torchpar's over the same backend."""

import socket
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from compare.side.collective_bench import (
    OURS,
    TIMES,
    CollectiveCase,
    CollectiveRequest,
    CollectiveRow,
    CollectiveTimes,
    elements,
    expected,
    make_row,
    measure,
    sent,
)
from compare.side.host_facts import host_names
from compare.system.facts import versions
from compare.system.json_files import write_json
from torchpar import PACKAGES
from torchpar.comm import process_groups
from torchpar.comm.collectives import Axis, gather_equal, reduce_scatter_equal
from torchpar.comm.mesh import device_kind
from torchpar.launch import Rank
from torchpar.run import now

IN_PLACE = ("all_reduce", "broadcast")


def run_bench(rank: Rank, *, request: CollectiveRequest, folder: Path) -> None:
    """Time collectives as one rank; rank 0 writes `folder/collectives.json`.

    Raises ExperimentError: the versions of the hosts differ.
    """
    torch.set_num_threads(1)
    device, world = process_groups.join_ranks(rank, request.platform), process_groups.world_group()
    axes, rows = {}, []
    for way in request.implementations:
        group = dist.new_group(backend="gloo") if way == "gloo" else world  # gloo as PyTorch has it
        axes[way] = Axis("world", size=request.ranks, rank=rank.rank, group=group)
    for number, case in enumerate(request.cases):
        for way, axis in axes.items():
            rank.at(number, "synchronisation")
            rows.append(time_case(way, axis, case, device=device, row_s=request.row_s))
    places = Axis.from_group(world).all_gather_objects((socket.gethostname(), rank.local_rank))
    if rank.rank == 0:
        times = CollectiveTimes(
            rows=rows,
            device_kind=device_kind(device),
            versions=versions(PACKAGES),
            threads="1 per rank",
            hosts=host_names(places),
        )
        write_json(folder / TIMES, times)
    process_groups.leave_group()


def time_case(
    way: str, axis: Axis, case: CollectiveCase, *, device: torch.device, row_s: float
) -> CollectiveRow:
    """Time one collective of one size along `axis`, then run it once more and check the result."""
    kind, ranks = case.kind, axis.size
    count = elements(kind, case.size, ranks)
    given = torch.from_numpy(sent(kind, axis.rank, ranks=ranks, count=count)).to(device)
    wanted = torch.from_numpy(expected(kind, axis.rank, ranks=ranks, count=count)).to(device)
    result = torch.zeros_like(wanted)  # repeated sums in place stay finite
    call = partial((OWN if way == OURS else STOCK)[kind], axis, given, result)
    seconds = measure(
        call,
        wait=partial(now, device),  # on a GPU a call returns before it is done
        slowest=lambda value: max(axis.all_gather_objects(value)),
        row_s=row_s,
    )
    result.copy_(given) if kind in IN_PLACE else result.fill_(-1)
    call()
    now(device)
    wrong = sum(axis.all_gather_objects(int((result != wanted).sum())))
    return make_row(way, case, ranks=ranks, seconds=seconds, wrong=wrong)


OWN = {
    "all_reduce": lambda axis, given, result: axis.all_reduce(result),
    "broadcast": lambda axis, given, result: axis.broadcast(result),
    "all_gather": lambda axis, given, result: axis.all_gather(result, given),
    "reduce_scatter": lambda axis, given, result: axis.reduce_scatter(result, given),
    "all_to_all": lambda axis, given, result: axis.all_to_all(result, given),
    "permute": lambda axis, given, result: axis.start_shift(result, given).wait(),
}
"""From `given` (n,) into `result` (n,), or on `result` in place."""
STOCK = {
    "all_reduce": lambda axis, given, result: dist.all_reduce(result, group=axis.group),
    "broadcast": lambda axis, given, result: dist.broadcast(result, group=axis.group, group_src=0),
    "all_gather": lambda axis, given, result: gather_equal(result, given, group=axis.group),
    "reduce_scatter": lambda axis, given, result: reduce_scatter_equal(result, given, group=axis.group),
    "all_to_all": lambda axis, given, result: dist.all_to_all_single(result, given, group=axis.group),
    "permute": OWN["permute"],  # `start_shift` is PyTorch's batch_isend_irecv
}
