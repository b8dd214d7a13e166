"""torchpar.manual.PipelineParallel around modules of all kinds, on four gloo ranks, in float64.

One launch of a fresh interpreter runs every case below; a rank that disagrees ends it with its traceback.
The oracle is the same modules one after the other on one rank, over the same microbatches.
"""

import os
import subprocess
import sys
import weakref
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from compare.contract.engines import ENGINES
from compare.contract.experiment import Experiment, ExperimentError, Layout, Model, Train
from compare.contract.parameters import initial_parameters
from compare.contract.record import Request, write_json
from compare.contract.schedule_checks import peak_in_flight
from compare.contract.schedules import Kind, Schedule, Task, make_schedule
from torchpar import collectives
from torchpar.collectives import Axis
from torchpar.launch import bind_to_loopback, launch
from torchpar.manual import parallelize
from torchpar.manual.data_parallel import DataParallel
from torchpar.manual.pipeline_parallel import PipelineParallel
from torchpar.manual.stage import Stage
from torchpar.mesh import make_mesh
from torchpar.model import GPT
from torchpar.optimizer import make_optimizer, optimizer_step
from torchpar.pipeline_faults import overwritten_microbatch
from torchpar.rank import Rank
from torchpar.stages import TIED
from torchpar.start import read_request
from torchpar.traffic import Call
from torchpar.weights import load_weights

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
RANKS = 4
WIDTHS = (5, 6, 3, 7, 4, 6, 2, 5)  # of each stage's output: no two boundaries alike
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)]
SMALL = Model(n_layer=4, n_head=2, n_embd=8, block_size=8, vocab_size=16, bias=True)
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
        body = partial(checkpoint, self.body, use_reentrant=False) if self.recomputes else self.body
        return self.out(body(x_BTI))


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


def case_an_overwritten_microbatch_is_seen(rank: Rank) -> None:
    """The comparison above can fail."""
    schedule = make_schedule("1f1b", ranks=RANKS, microbatches=4)
    whole, mine = make_stages(RANKS), make_stages(RANKS)
    data, own = make_data(4), own_stages(schedule, rank.rank, mine)
    expected(whole, data)
    with overwritten_microbatch("torch-manual"):
        PipelineParallel(own, schedule=schedule, loss=loss, boundary=boundary).run(*data)
    with pytest.raises(AssertionError, match=r"(norm|twice|convolution|out|embedding)\."):
        assert_same_gradients(whole[rank.rank], mine[rank.rank])


def case_data_parallel_stages_reduce_once(rank: Rank) -> None:
    mesh = make_mesh(Layout(pp=2, dp_replicate=2), rank=rank.rank, device=torch.device("cpu"))
    for name, chunks in SCHEDULES:
        for sync in ("bucketed", "flat"):
            schedule = make_schedule(name, ranks=2, microbatches=4, chunks=chunks)
            whole, mine = (make_stages(2 * chunks) for _ in range(2))
            data, own = make_data(8), own_stages(schedule, mesh.pp.rank, mine)
            both = nn.ModuleList(own.values())
            replicas = DataParallel(both, gradient_sync=sync, bucket_size_mb=1e-3, group=mesh.dp_replicate)
            mesh.traffic.clear()
            pipeline = PipelineParallel(
                own,
                schedule=schedule,
                loss=loss,
                boundary=boundary,
                group=mesh.pp,
                no_sync=replicas.no_sync,
            )
            share = slice(4 * mesh.dp_replicate.rank, 4 * mesh.dp_replicate.rank + 4)
            pipeline.run(data[0][share], data[1][share])
            replicas.finish_gradient_synchronization()
            expected(whole, data)
            for number, module in own.items():
                assert_same_gradients(whole[number], module)
            reduced = mesh.traffic.bytes[Call("all_reduce", "dp_replicate", "gradients")]
            assert reduced == sum(p.nbytes for p in both.parameters() if p.requires_grad)


def case_copies_of_a_tied_weight_stay_equal(rank: Rank) -> None:
    for layout in (
        Layout(pp=4, microbatches=4),
        Layout(pp=2, dp_shard=2, zero=1, microbatches=2),
        Layout(pp=2, dp_shard=2, zero=3, microbatches=2),
    ):
        experiment = Experiment(model=SMALL, train=Train(batch_size=4), layout=layout)
        mesh = make_mesh(layout, rank=rank.rank, device=torch.device("cpu"))
        model = GPT(SMALL)
        load_weights(model, initial_parameters(experiment))
        plan = parallelize(
            model, mesh=mesh, layout=layout, make_optimizer=partial(make_optimizer, experiment=experiment)
        )
        assert plan.run_pipeline
        rows = torch.arange(2 * 4 * 8).view(2, 4, 8).chunk(mesh.data.size, dim=1)[mesh.data.rank] % 16
        for step in range(3):
            plan.run_pipeline(rows, rows, nullcontext)
            plan.finish_gradient_synchronization()
            optimizer_step(plan, experiment.optimizer, step)
        mine = plan.weights().get(TIED)
        copies = [tied for tied in mesh.pp.all_gather_objects(mine) if tied is not None]
        assert len(copies) == 2
        assert torch.equal(copies[0], copies[1])


def case_bad_arguments_are_named(rank: Rank) -> None:
    schedule = make_schedule("1f1b", ranks=RANKS, microbatches=4)
    modules = make_stages(RANKS)
    make = partial(PipelineParallel, schedule=schedule, loss=loss, boundary=boundary)
    with pytest.raises(ValueError, match=rf"rank {rank.rank} of 4 was given the stages \[7\]"):
        make({7: modules[0]})
    pipeline = make({rank.rank: modules[rank.rank]})
    with pytest.raises(ValueError, match="3 inputs and 3 targets for a schedule of 4"):
        pipeline.run(*make_data(3))


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


def test_a_schedule_of_one_rank_needs_no_network():
    whole, mine = make_stages(3), make_stages(3)
    tasks = [Task(Kind.FORWARD, stage, m) for stage in range(3) for m in range(2)]
    tasks += [Task(Kind.BACKWARD, stage, m) for stage in (2, 1, 0) for m in range(2)]
    alone = Axis("pp", size=1, rank=0, group=None)
    pipeline = PipelineParallel(
        dict(enumerate(mine)), schedule=[tasks], loss=loss, boundary=boundary, group=alone
    )
    data = make_data(2)
    close(pipeline.run(*data), expected(whole, data))
    for a, b in zip(whole, mine, strict=True):
        assert_same_gradients(a, b)
    assert pipeline.peak_in_flight == 6


@pytest.mark.parametrize("splits", [False, True])
def test_backward_frees_what_forward_kept(splits):
    made = []
    module = nn.Sequential(nn.Linear(3, 3), Watch(made), nn.Linear(3, 3))
    stage = Stage(module, splits_backward=splits)
    outputs = [stage.forward(m, torch.ones(2, 3)) for m in range(2)]
    assert stage.in_flight == 2
    assert all(reference() is not None for reference in made)
    stage.backward(0, torch.ones_like(outputs[0]))
    assert stage.in_flight == 1 + splits
    if splits:
        stage.backward_weight(0)
    assert [reference() is None for reference in made] == [True, False]
    assert stage.in_flight == 1


class Watch(nn.Module):
    """Notes weak references to what it computes, which its own backward needs."""

    def __init__(self, made: list):
        super().__init__()
        self.made = made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        self.made.append(weakref.ref(y.untyped_storage()))
        return y


def test_halves_of_a_backward_are_no_more_work_than_the_whole():
    def flops(*, splits: bool) -> list[int]:
        stage = Stage(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), splits_backward=splits)
        y = stage.forward(0, torch.ones(5, 8))
        counts = []
        for half in (partial(stage.backward, 0, torch.ones_like(y)), partial(stage.backward_weight, 0)):
            with FlopCounterMode(display=False) as counter:
                if splits or half.func == stage.backward:
                    half()
            counts.append(counter.get_total_flops())
        return counts

    (whole, nothing), (of_input, of_weights) = flops(splits=False), flops(splits=True)
    assert nothing == 0
    assert of_input == of_weights == whole // 2 == 2 * 5 * (8 * 16 + 16 * 4)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_deferred_weight_gradients_equal_those_of_autograd(dtype):
    def gradients(*, splits: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Linear(6, 8, bias=False),
            nn.LayerNorm(8),
            nn.Linear(8, 8).requires_grad_(False),
            nn.Linear(8, 6),
        )
        stage = Stage(module, splits_backward=splits)
        for m in range(2):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                y = stage.forward(m, torch.randn(2, 5, 6))
            stage.backward(m, torch.ones_like(y))
            if splits:
                stage.backward_weight(m)
        return [p.grad for p in module.parameters()]

    for a, b in zip(gradients(splits=False), gradients(splits=True), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"schedule": "zero_bubble", "dp_replicate": 2}, "DDP reduces wrongly"),
        ({"schedule": "zero_bubble", "dp_shard": 2, "zero": 3}, "FSDP2 not at all"),
        ({"schedule": "zero_bubble", "tp": 2}, "DTensor"),
        ({"schedule": "zero_bubble", "remat": "dots"}, "selective recomputation"),
    ],
)
def test_pytorch_is_not_asked_for_what_it_gets_wrong(options, reason):
    layout = Layout(pp=2, microbatches=2, **options)
    with pytest.raises(ExperimentError, match=f"torch-library.*{options['schedule']}.*{reason}"):
        ENGINES["torch-library"].require(layout)
    ENGINES["torch-manual"].require(layout)


def test_gpus_are_refused_before_any_process_starts(tmp_path):
    experiment = Experiment(layout=Layout(pp=2, microbatches=2))
    write_json(
        tmp_path / "request.json", Request(engine="torch-manual", experiment=experiment, platform="gpu")
    )
    with pytest.raises(ExperimentError, match="NCCL"):
        read_request(tmp_path)


if __name__ == "__main__":
    bind_to_loopback()
    launch(run_cases, world_size=RANKS, folder=Path(sys.argv[1]), timeout_s=60)
