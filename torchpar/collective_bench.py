"""Time collectives between ranks: PyTorch's stock operation, and our way over the same backend."""

import functools
import socket
from collections.abc import Callable
from pathlib import Path

import torch

from compare.contract.across_hosts import host_names
from compare.contract.collective_bench import SIDE as SIDE_FILE
from compare.contract.collective_bench import (
    TYPE,
    CollectiveCase,
    CollectiveRequest,
    CollectiveRow,
    CollectiveSide,
    append_row,
    elements,
    expected,
    make_row,
    measure,
    sent,
    total_bytes,
)
from compare.contract.other_hosts import facts_here, leave_hosts, require_agreement
from compare.host.facts import versions
from compare.host.json_files import write_json
from torchpar.comm import process_groups
from torchpar.comm.collectives import Axis
from torchpar.comm.devices import PACKAGES, device_kind
from torchpar.comm.stock_collectives import StockAxis
from torchpar.launch import Rank

AXES = {"gloo": StockAxis, "nccl": StockAxis, "ours": Axis}
"""By the implementation's name (`compare.contract.collective_bench`)."""
IN_PLACE = ("all_reduce", "broadcast")


def time_as_rank(rank: Rank, *, request: CollectiveRequest, folder: Path) -> None:
    """Time every case as one of the ranks; the first one writes rows.jsonl, then side.json.

    Raises:
        ExperimentError: the hosts have other versions of a package.
    """
    device = torch.device("cuda", rank.local_rank) if request.platform == "gpu" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    process_groups.join_group(
        rank=rank.rank,
        world_size=request.ranks,
        device=device,
        rendezvous=rank.rendezvous,
        timeout_s=rank.collective_timeout_s,
    )
    rank.at(0, "setting up")
    world = Axis.of(None)
    facts = world.all_gather_objects(facts_here(PACKAGES))
    require_agreement(facts)
    if rank.rank == 0 and rank.rendezvous is None:
        leave_hosts(folder, facts)
    axes = {name: axis_of(name, rank.rank, ranks=request.ranks) for name in request.implementations}
    for number, case in enumerate(request.cases):
        for name, axis in axes.items():
            rank.at(number, "synchronisation")
            row = time_case(name, axis, case, request=request, device=device)
            if rank.rank == 0:
                append_row(folder, row)
    places = world.all_gather_objects((socket.gethostname(), rank.local_rank))
    if rank.rank == 0:
        side = CollectiveSide(
            device_kind=device_kind(device),
            versions=versions(PACKAGES),
            threads="1 per rank",
            hosts=tuple(host_names(places)),
        )
        write_json(folder / SIDE_FILE, side)
    process_groups.leave_group()


def axis_of(name: str, rank: int, *, ranks: int) -> Axis:
    """All ranks, for one implementation; PyTorch's own operations on gloo get a group as PyTorch makes it."""
    group = process_groups.make_stock_group() if name == "gloo" else process_groups.world_group()
    return AXES[name]("world", size=ranks, rank=rank, group=group)


def time_case(
    name: str, axis: Axis, case: CollectiveCase, *, request: CollectiveRequest, device: torch.device
) -> CollectiveRow:
    """Time one collective of one size along `axis`, then do it once more and look at what it gave.

    Args:
        name: of the implementation.
        axis: of the collective.
        case: kind and size.
        request: for how long, and which fault.
        device: of this rank.
    """
    kind, ranks = case.kind, axis.size
    count = elements(kind, case.size, ranks)
    given = torch.from_numpy(sent(kind, axis.rank, ranks=ranks, count=count)).to(device)
    wanted = torch.from_numpy(expected(kind, axis.rank, ranks=ranks, count=count)).to(device)
    result = torch.zeros_like(wanted)  # sums over and over in place stay finite
    call = make_call(kind, axis, given, result)
    seconds, iterations = measure(
        call,
        wait=functools.partial(_wait, device),
        slowest=lambda value: max(axis.all_gather_objects(value)),
        row_s=request.row_s,
    )
    result.copy_(given) if kind in IN_PLACE else result.fill_(-1)
    call()
    _wait(device)
    if kind == request.fault and axis.rank == ranks - 1:
        result[-1] += 1
    wrong = sum(axis.all_gather_objects(int((result != wanted).sum())))
    assert total_bytes(kind, count, ranks) == TYPE.itemsize * max(len(given), len(result))
    return make_row(name, case, ranks=ranks, seconds=seconds, iterations=iterations, wrong=wrong)


def make_call(kind: str, axis: Axis, given: torch.Tensor, result: torch.Tensor) -> Callable[[], object]:
    """The collective, called with (): from `given` (n,) into `result` (n,), or on `result` in place."""
    match kind:
        case "all_reduce":
            return lambda: axis.all_reduce(result)
        case "broadcast":
            return lambda: axis.broadcast(result)
        case "all_gather":
            return lambda: axis.all_gather(result, given)
        case "reduce_scatter":
            return lambda: axis.reduce_scatter(result, given)
        case "all_to_all":
            return lambda: axis.all_to_all(result, given)
    if isinstance(axis, StockAxis):
        return lambda: axis.shift(result, given)
    return lambda: _shift(result, given, axis=axis)


def _shift(result: torch.Tensor, given: torch.Tensor, *, axis: Axis) -> None:
    """Send to the next rank of the ring, and receive from the one before, as torch-manual's pipeline does.

    NCCL has no tags and goes by the order: were all to send first, each would wait for the next.
    """
    send = functools.partial(axis.start_send, given, to=(axis.rank + 1) % axis.size)
    receive = functools.partial(axis.start_receive, result, source=(axis.rank - 1) % axis.size)
    for work in [begin() for begin in ((send, receive) if axis.rank % 2 == 0 else (receive, send))]:
        work.wait()


def _wait(device: torch.device) -> None:
    """On a GPU calls return before they are done; gloo's do not."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
