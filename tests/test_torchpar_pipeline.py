"""torchpar.manual.PipelineParallel around modules of all kinds, on four gloo ranks, in float64.

One launch of a fresh interpreter runs every case below; a rank that disagrees ends it with its traceback.
The oracle is the same modules one after the other on one rank, over the same microbatches.
"""

import os
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compare.contract.schedule_checks import peak_in_flight
from compare.contract.schedules import Kind, Schedule, Task, make_schedule
from torchpar import collectives
from torchpar.collectives import Axis
from torchpar.launch import bind_to_loopback, launch
from torchpar.manual.data_parallel import DataParallel
from torchpar.manual.deferred import DeferredWeightGradients
from torchpar.manual.pipeline_parallel import PipelineParallel
from torchpar.manual.stage import Stage
from torchpar.rank import Rank
from torchpar.traffic import Call

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
RANKS = 4
WIDTHS = (5, 6, 3, 7, 4, 6, 2, 5)  # of each stage's output: no two boundaries alike
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)]
close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-15)


class Odd(nn.Module):
    """A stage with a convolution, a norm, a frozen and a shared linear layer, and perhaps recomputation."""

    def __init__(self, inside: int, outside: int, *, seed: int, recomputes: bool):
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(inside)
        self.twice = nn.Linear(inside, inside)
        self.convolution = nn.Conv1d(1, 1, 3, padding=1)
        self.frozen = nn.Linear(inside, inside).requires_grad_(False)
        self.out = nn.Linear(inside, outside)
        self.recomputes = recomputes

    def body(self, x_BTI: torch.Tensor) -> torch.Tensor:
        x_BTI = self.twice(F.gelu(self.twice(self.norm(x_BTI))))
        x_BTI = x_BTI + self.convolution(x_BTI.flatten(0, 1).unsqueeze(1)).squeeze(1).view_as(x_BTI)
        return x_BTI + torch.tanh(self.frozen(x_BTI))

    def forward(self, x_BTI: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            x_BTI = checkpoint(self.body, x_BTI, use_reentrant=False)
        else:
            x_BTI = self.body(x_BTI)
        return self.out(x_BTI)


class First(nn.Module):
    """Token ids in, and all else as above."""

    def __init__(self, odd: Odd, *, inside: int):
        super().__init__()
        self.embedding, self.odd = nn.Embedding(11, inside), odd

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        return self.odd(self.embedding(ids_BT))


def make_stages(count: int, *, recomputes: bool = False) -> list[nn.Module]:
    """The whole model, the same on all ranks."""
    insides = (WIDTHS[-1], *WIDTHS)
    odds = [Odd(insides[n], WIDTHS[n], seed=n, recomputes=recomputes) for n in range(count)]
    torch.manual_seed(100)
    first = First(odds[0], inside=insides[0])
    return [module.double() for module in (first, *odds[1:])]


def make_data(microbatches: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    ids_MBT = torch.randint(11, (microbatches, 2, 3), generator=generator)
    targets_MBT = torch.randint(2, (microbatches, 2, 3), generator=generator)
    return list(ids_MBT), list(targets_MBT)


def loss(y_BTO: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y_BTO.flatten(0, 1), targets_BT.flatten())


def boundary(stage: int, ids_BT: torch.Tensor) -> torch.Tensor:
    return torch.empty(*ids_BT.shape, WIDTHS[stage], dtype=torch.float64, device="meta")


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


def own_stages(schedule: Schedule, rank: int, stages: list[nn.Module]) -> dict[int, nn.Module]:
    return {task.stage: stages[task.stage] for task in schedule[rank]}


def case_every_schedule_equals_one_rank(rank: Rank) -> None:
    for name, chunks in SCHEDULES:
        for microbatches in (4, 8):
            for recomputes in (False, True):
                schedule = make_schedule(name, ranks=RANKS, microbatches=microbatches, chunks=chunks)
                count = RANKS * chunks
                whole, mine = (make_stages(count, recomputes=recomputes) for _ in range(2))
                data, own = make_data(microbatches), own_stages(schedule, rank.rank, mine)
                axis = Axis.of(None)
                pipeline = PipelineParallel(own, schedule=schedule, loss=loss, boundary=boundary, group=axis)
                for _ in range(2):  # a second step finds nothing left of the first
                    reference = expected(whole, data)
                    close(pipeline.run(*data), reference)
                    for number, module in own.items():
                        assert_same_gradients(whole[number], module)
                assert pipeline.peak_in_flight == peak_in_flight(schedule[rank.rank])
                sent = [boundary(n, data[0][0]).nbytes for n in own if n + 1 < count]
                assert axis.traffic.bytes[
                    Call("permute", axis.name, "activations")
                ] == 2 * microbatches * sum(sent)


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


def run_cases(rank: Rank) -> None:
    torch.set_num_threads(1)
    collectives.join_group(
        rank=rank.rank,
        world_size=RANKS,
        device=torch.device("cpu"),
        rendezvous=rank.rendezvous,
        timeout_s=60,
    )
    for case in CASES:
        case(rank)
        Axis.of(None).all_reduce(torch.zeros(1))  # in step, so that a failure is one case's own
        if rank.rank == 0:
            print(case.__name__, flush=True)
    collectives.leave_group()


def test_pipelines_on_four_ranks(tmp_path):
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == [case.__name__ for case in CASES]


if __name__ == "__main__":
    bind_to_loopback()
    launch(run_cases, world_size=RANKS, folder=Path(sys.argv[1]), timeout_s=60)
