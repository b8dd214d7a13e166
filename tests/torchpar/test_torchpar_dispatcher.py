"""What any program sends, in whatever form and on whatever thread: the public ledger against sums by hand."""

import threading

import pytest
import torch
import torch.distributed as dist
from ranks import RANKS, on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import torchpar
from compare.contract.ledger import UnexpectedCommunicationError, assert_communication
from torchpar.comm import process_groups
from torchpar.measure import dispatcher
from torchpar.measure.calls import call_of

N = 8
PIECE = 4 * N
"""Bytes of a float32 piece."""
FULL = RANKS * PIECE


def piece() -> torch.Tensor:
    return torch.ones(N)


def full() -> torch.Tensor:
    return torch.ones(RANKS * N)


def pieces() -> list[torch.Tensor]:
    return [piece() for _ in range(RANKS)]


def coalesced_gathers() -> None:
    with dist._coalescing_manager():
        dist.all_gather_into_tensor(full(), piece())
        dist.all_gather_into_tensor(full(), piece())


def coalesced_scatters() -> None:
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(piece(), full())
        dist.reduce_scatter_tensor(piece(), full())


def functional_out(rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    gather = torch.ops._c10d_functional.all_gather_into_tensor_out
    torch.ops._c10d_functional.wait_tensor(gather(piece(), RANKS, group.group_name, out=full()))


def uneven_exchange(rank: int) -> None:
    """The first rank sends every other one a whole piece, and they send it one number each."""
    sent, received = ([N] * RANKS, [N] + [1] * (RANKS - 1)) if rank == 0 else ([1], [N])
    nothing = [0] * (RANKS - len(sent))
    dist.all_to_all_single(
        torch.empty(sum(received)), torch.ones(sum(sent)), received + nothing, sent + nothing
    )


FORMS = {
    "all_to_all_single": (lambda rank: dist.all_to_all_single(full(), full()), "all_to_all", FULL),
    "all_to_all": (lambda rank: dist.all_to_all(pieces(), pieces()), "all_to_all", FULL),
    "gather": (lambda rank: dist.gather(piece(), None if rank else pieces()), "gather", FULL),
    "scatter": (lambda rank: dist.scatter(piece(), None if rank else pieces()), "scatter", FULL),
    "all_gather": (lambda rank: dist.all_gather(pieces(), piece()), "all_gather", FULL),
    "reduce_scatter": (lambda rank: dist.reduce_scatter(piece(), pieces()), "reduce_scatter", FULL),
    "all_reduce_coalesced": (
        lambda rank: dist.all_reduce_coalesced([piece(), piece()]),
        "all_reduce",
        2 * PIECE,
    ),
    "all_gather_coalesced": (
        lambda rank: dist.all_gather_coalesced([[piece(), piece()] for _ in range(RANKS)], pieces()[:2]),
        "all_gather",
        2 * FULL,
    ),
    "gathers under a coalescing manager": (lambda rank: coalesced_gathers(), "all_gather", 2 * FULL),
    "scatters under a coalescing manager": (lambda rank: coalesced_scatters(), "reduce_scatter", 2 * FULL),
    "a functional gather into a tensor": (functional_out, "all_gather", FULL),
}


@on_ranks
def test_every_form_of_a_collective_has_its_kind_and_the_bytes_of_its_full_tensor(rank: int) -> None:
    for form, (call, kind, size) in FORMS.items():
        with torchpar.ledger() as ledger:
            call(rank)
        found = [(row.kind, row.calls, row.bytes, row.dtype) for row in ledger.rows]
        assert found == [(kind, 1, size, "float32")], form
        factor = 2 if kind == "all_reduce" else 1
        assert ledger.rows[0].wire_bytes == factor * size * (RANKS - 1) // RANKS, form
        assert ledger.is_complete, form


@on_ranks
def test_of_an_uneven_exchange_a_row_has_what_the_rank_sends(rank: int) -> None:
    with torchpar.ledger() as ledger:
        uneven_exchange(rank)
    assert [(row.kind, row.bytes) for row in ledger.rows] == [("all_to_all", FULL if rank == 0 else 4)]


@on_ranks
def test_calls_of_two_lines_are_two_rows_through_a_decorator_that_deprecates(rank: int) -> None:
    with torchpar.ledger() as ledger:
        dist.all_gather_into_tensor(full(), piece())
        dist.all_gather_into_tensor(full(), piece())
        dist.reduce_scatter_tensor(piece(), full())
    assert len({row.source for row in ledger.rows}) == 3
    assert all(row.source.startswith("test_torchpar_dispatcher.py:") for row in ledger.rows)


@on_ranks
def test_what_other_threads_and_callbacks_of_futures_send_has_rows(rank: int) -> None:
    # Of two workers: a callback that waits for a collective of its group keeps one of them.
    group = process_groups.make_stock_group()

    def send() -> None:
        dist.all_reduce(piece(), group=group)

    with torchpar.ledger() as ledger:
        thread = threading.Thread(target=send)
        thread.start()
        thread.join()
        begun = dist.all_reduce(piece(), group=group, async_op=True)
        assert begun is not None
        begun.get_future().then(lambda future: send()).wait()
    assert_communication(ledger, {("all_reduce", "subgroup"): 3 * PIECE})
    assert all(row.source.startswith("test_torchpar_dispatcher.py:") for row in ledger.rows)

    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model = DistributedDataParallel(nn.Linear(N, 2 * N), process_group=group)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        model(piece()).sum().backward()
    with torchpar.ledger() as ledger:
        model(piece()).sum().backward()
    # p (2 N,) and the bias, then q (N,), the last two sent by callbacks of the hook
    assert_communication(ledger, {("all_reduce", "subgroup"): 4 * (2 * N + 2 * N + N)})
    assert all("py:" in row.source for row in ledger.rows)


@on_ranks
def test_what_goes_past_the_dispatcher_makes_a_ledger_incomplete(rank: int) -> None:
    group = dist.new_group()
    with torchpar.ledger() as ledger:
        dist.all_reduce(piece(), group=group)
        group._get_backend(torch.device("cpu")).allreduce([piece()]).wait()
    assert [row.bytes for row in ledger.rows] == [PIECE]
    assert not ledger.is_complete
    with pytest.raises(UnexpectedCommunicationError, match=r"incomplete: over subgroup .* 1 went past"):
        assert_communication(ledger, {("all_reduce", "subgroup"): PIECE})

    with torchpar.ledger() as ledger:  # what was there before is not its own; nor are new groups
        dist.all_reduce(piece(), group=dist.new_group())
        dist.barrier()
        dist.monitored_barrier()
    assert ledger.is_complete
    assert [row.bytes for row in ledger.rows] == [PIECE]


@on_ranks
def test_the_number_of_a_batch_is_of_no_operation_past_the_dispatcher(rank: int) -> None:
    """NCCL takes one when a batch begins. gloo's take none: here is one that does."""
    group = dist.group.WORLD
    assert group is not None

    def begins(group: dist.ProcessGroup, device: torch.device) -> None:
        group._get_backend(device).allreduce([piece()]).wait()

    with torchpar.ledger() as ledger, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "_start_coalescing", begins)
        group._start_coalescing(torch.device("cpu"))
    assert ledger.is_complete
    assert vars(dist.ProcessGroup)["_start_coalescing"] is dispatcher._start_coalescing  # PyTorch's own again


@on_ranks
def test_sparse_gradients_are_counted_with_their_indices(rank: int) -> None:
    model = DistributedDataParallel(nn.Embedding(9, N, sparse=True))
    with torchpar.ledger() as ledger:
        model(torch.tensor([1, 2])).sum().backward()
    assert_communication(ledger, {("all_reduce", "world"): 2 * (PIECE + 8)})


@on_ranks
def test_what_cannot_be_read_is_a_problem_and_no_error(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch, torchpar.ledger() as ledger:
        patch.delitem(call_of.__globals__["KINDS"], "allreduce")
        total = piece()
        dist.all_reduce(total)
    assert total[0] == RANKS
    assert ledger.problems == ["allreduce_ over world is in no row: c10d::allreduce_ is not known"]


@on_ranks
def test_all_that_the_step_of_an_optimizer_sends_is_of_the_update(rank: int) -> None:
    """Also after the step of an optimizer inside of it, and not what follows a step that failed."""
    model = nn.Sequential(nn.Linear(N, N), nn.Linear(N, N), nn.Linear(N, N), nn.Linear(N, N))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(piece()).sum().backward()
    with torchpar.ledger() as ledger:
        optimizer.step()
    assert {(row.kind, row.phase) for row in ledger.rows} == {("broadcast", "update")}

    def fails() -> float:
        raise ArithmeticError

    with torchpar.ledger() as ledger:
        with pytest.raises(ArithmeticError):
            torch.optim.SGD(model.parameters(), lr=0.1).step(fails)
        dist.all_reduce(piece())
    assert {row.phase for row in ledger.rows} == {""}
