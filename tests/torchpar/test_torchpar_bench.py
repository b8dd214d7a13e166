"""The check of results in the benchmark of collectives counts one wrong element on any rank."""

import torch
import torch.distributed as dist

from compare.side.collective_bench import KINDS, CollectiveCase
from tests.support.ranks import RANKS, axis, on_ranks
from torchpar.comm.collectives import Axis
from torchpar.measure import bench


@on_ranks
def test_bench_counts_wrong_elements(rank: int) -> None:
    how = {"device": torch.device("cpu"), "row_s": 1e-4}
    stock = Axis("world", size=RANKS, rank=rank, group=dist.new_group(backend="gloo"))
    for way, along, calls in (("gloo", stock, bench.STOCK), ("ours", axis(), bench.OWN)):
        for kind in KINDS:
            case, call = CollectiveCase(kind, 512), calls[kind]
            assert bench.time_case(way, along, case, **how).wrong == 0

            def damaged(axis, given, result, call=call):
                call(axis, given, result)
                result[-1] += axis.rank == RANKS - 1

            calls[kind] = damaged
            try:
                assert bench.time_case(way, along, case, **how).wrong == 1
            finally:
                calls[kind] = call
