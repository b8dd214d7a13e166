"""`run_pipeline` of torch-manual on four gloo ranks, in float64.

The reference is the same modules in order on one rank, over the same microbatches.

Shapes: M microbatches, B batch, T sequence, C features.
"""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compare.pipeline.rendezvous import is_receive
from compare.pipeline.schedules import Kind, Schedule, forward_only, make_schedule
from compare.spec.axes import DP_REPLICATE, PP
from compare.spec.experiment import Layout
from tests.support.ranks import CPU, RANKS, axis, counted, on_ranks
from torchpar.comm.collectives import Axis, Call
from torchpar.comm.mesh import make_mesh
from torchpar.manual import no_sync
from torchpar.manual.data_parallel import DataParallel
from torchpar.manual.pipeline_parallel import make_plan, message_of, run_pipeline
from torchpar.manual.stage import Stage
from torchpar.manual.zero_bubble import ZeroBubbleStage

WIDTH = 5
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)]
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-15)


class Odd(nn.Module):
    """A stage with a convolution, a norm and a linear layer that runs twice, perhaps recomputed.

    The first stage takes token ids, the other stages activations.
    """

    def __init__(self, stage: int, *, recomputes: bool):
        super().__init__()
        torch.manual_seed(stage)
        self.embedding = nn.Embedding(11, WIDTH) if stage == 0 else nn.Identity()
        self.norm = nn.LayerNorm(WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.convolution = nn.Conv1d(1, 1, 3, padding=1)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.recomputes = recomputes

    def body(self, x_BTC: torch.Tensor) -> torch.Tensor:
        x_BTC = self.twice(F.gelu(self.twice(self.norm(x_BTC))))
        return x_BTC + self.convolution(x_BTC.flatten(0, 1).unsqueeze(1)).squeeze(1).view_as(x_BTC)

    def forward(self, x: torch.Tensor, *, stage: int = 0) -> torch.Tensor:
        body = partial(checkpoint, self.body, use_reentrant=False) if self.recomputes else self.body
        return self.out(body(self.embedding(x)))


def make_stages(count: int, *, recomputes: bool = False) -> list[nn.Module]:
    """All stages of the model, equal on all ranks."""
    return [Odd(stage, recomputes=recomputes).double() for stage in range(count)]


def make_data(microbatches: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    ids_MBT = torch.randint(11, (microbatches, 2, 3), generator=generator)
    targets_MBT = torch.randint(2, (microbatches, 2, 3), generator=generator)
    return list(ids_MBT), list(targets_MBT)


def loss(y_BTC: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y_BTC.flatten(0, 1), targets_BT.flatten())


def empty_stream(ids_BT: torch.Tensor) -> torch.Tensor:
    return torch.empty(*ids_BT.shape, WIDTH, dtype=torch.float64)


def expected(stages: list[nn.Module], data: tuple[list[torch.Tensor], list[torch.Tensor]]) -> torch.Tensor:
    """The mean loss, and its gradients on the modules."""
    total = sum(loss(nn.Sequential(*stages)(x), y) for x, y in zip(*data, strict=True)) / len(data[0])
    assert isinstance(total, torch.Tensor)
    total.backward()
    return total.detach()


def assert_same_gradients(expected: nn.Module, got: nn.Module) -> None:
    for (name, a), b in zip(expected.named_parameters(), got.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None and b.grad is not None:
            close(b.grad, a.grad, msg=lambda text, name=name: f"{name}: {text}")


class Pipeline:
    """This rank's stages under a schedule."""

    def __init__(self, own: dict[int, nn.Module], schedule: Schedule, axis: Axis, **options: Any):
        self.axis, self.schedule = axis, schedule
        self.options = {"upwards": axis, "loss_scale": 1.0, "no_sync": nullcontext, **options}
        stages = 1 + max(task.stage for tasks in schedule for task in tasks)
        self.part: Any = SimpleNamespace(stages=stages, mean_loss=loss, empty_stream=empty_stream)
        halves = any(task.kind == Kind.BACKWARD_WEIGHT for task in schedule[0])
        self.stages = {n: (ZeroBubbleStage if halves else Stage)(module, n) for n, module in own.items()}

    def run(self, inputs: list[torch.Tensor], targets: list[torch.Tensor]) -> torch.Tensor:
        schedule, ranks = self.schedule, self.axis.size
        if not torch.is_grad_enabled():
            chunks = self.part.stages // ranks
            schedule = forward_only(ranks=ranks, microbatches=len(inputs), chunks=chunks)
        plan = make_plan(schedule, self.axis.rank)
        return run_pipeline(plan, self.stages, self.part, self.axis, inputs, targets, **self.options)


def own_stages(schedule: Schedule, rank: int, stages: list[nn.Module]) -> dict[int, nn.Module]:
    return {task.stage: stages[task.stage] for task in schedule[rank]}


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
@on_ranks
def test_every_schedule_equals_one_rank(rank: int, name: str, chunks: int) -> None:
    for microbatches in (4, 8):
        for recomputes in (False, True):
            schedule = make_schedule(name, ranks=RANKS, microbatches=microbatches, chunks=chunks)
            count = RANKS * chunks
            whole, mine = (make_stages(count, recomputes=recomputes) for _ in range(2))
            data, own = make_data(microbatches), own_stages(schedule, rank, mine)
            pipeline = Pipeline(own, schedule, axis())
            with counted() as sent:
                for _ in range(2):  # the second step starts without state of the first
                    reference = expected(whole, data)
                    close(pipeline.run(*data), reference)
                    for number, module in own.items():
                        assert_same_gradients(whole[number], module)
                    with torch.no_grad():  # an evaluation changes no gradient
                        close(pipeline.run(*data), reference)
                    for number, module in own.items():
                        assert_same_gradients(whole[number], module)
            size = sum(empty_stream(data[0][0]).nbytes for n in own if n + 1 < count)
            assert sent[Call("permute", axis().name, "activations")] == 4 * microbatches * size


@on_ranks
def test_data_parallel_stages_reduce_once(rank: int) -> None:
    mesh = make_mesh(Layout(pp=2, dp_replicate=2), rank=rank, device=CPU)
    for name, chunks in SCHEDULES:
        for sync in ("bucketed", "flat"):
            schedule = make_schedule(name, ranks=2, microbatches=4, chunks=chunks)
            whole, mine = (make_stages(2 * chunks) for _ in range(2))
            data, own = make_data(8), own_stages(schedule, mesh[PP].rank, mine)
            both = nn.ModuleList(own.values())
            axis_of = dict.fromkeys(both.parameters(), mesh[DP_REPLICATE])
            how = {"gradient_sync": sync, "bucket_size_mb": 1e-3, "axis_of": axis_of, "ranks": 2}
            replicas = DataParallel(both, **how)
            pipeline = Pipeline(own, schedule, mesh[PP], no_sync=partial(no_sync, replicas))
            share = slice(4 * mesh[DP_REPLICATE].rank, 4 * mesh[DP_REPLICATE].rank + 4)
            with counted() as sent:
                pipeline.run(data[0][share], data[1][share])
                replicas.finish_gradient_synchronization()
            expected(whole, data)
            for number, module in own.items():
                assert_same_gradients(whole[number], module)
            reduced = sent[Call("all_reduce", "dp_replicate", "gradients")]
            assert reduced == sum(p.nbytes for p in both.parameters())


def test_send_is_waited_for_once_arrived():
    for name, chunks in SCHEDULES:
        for ranks in (1, 2, 3, 4):
            schedule = make_schedule(name, ranks=ranks, microbatches=3 * ranks, chunks=chunks)
            plans = [make_plan(schedule, rank) for rank in range(ranks)]
            for rank, plan in enumerate(plans):
                proven = [message for arrived in plan.arrivals.values() for message in arrived]
                assert len(proven) == len(set(proven))
                for peer, other in enumerate(plans):
                    received = set()  # by the peer, of this rank, before each message that it sends here
                    for action in (action for action in other.actions if action.peer == rank != peer):
                        if is_receive(action):
                            received.add(message_of(action))
                        else:
                            assert received.issuperset(plan.arrivals[message_of(action)])
                            received.difference_update(plan.arrivals[message_of(action)])
                last = sorted(plan.last_backwards)
                assert {task.microbatch for task in last} <= {3 * ranks - 1}
                assert len(last) == (0 if name == "zero_bubble" else chunks)
