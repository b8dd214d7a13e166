"""The benchmark's own check of results: a collective that gives one wrong element is counted, on any rank."""

import torch

from compare.side.collective_bench import KINDS, CollectiveCase
from tests.support.ranks import RANKS, on_ranks
from torchpar import collective_bench


@on_ranks
def test_every_way_is_right_and_one_wrong_element_is_counted(rank: int) -> None:
    how = {"device": torch.device("cpu"), "row_s": 1e-4}
    for way, calls in (("gloo", collective_bench.STOCK), ("ours", collective_bench.OWN)):
        axis = collective_bench.axis_of(way, rank, ranks=RANKS)
        for kind in KINDS:
            case, call = CollectiveCase(kind, 512), calls[kind]
            assert collective_bench.time_case(way, axis, case, **how).wrong == 0

            def damaged(axis, given, result, call=call):
                call(axis, given, result)
                result[-1] += axis.rank == RANKS - 1

            calls[kind] = damaged
            try:
                assert collective_bench.time_case(way, axis, case, **how).wrong == 1
            finally:
                calls[kind] = call
