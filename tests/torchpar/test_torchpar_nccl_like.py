"""The stand-in for NCCL, and whole trainings of every preset on it.

Each training is compared with the plain GPT on one device, which another file compares with NumPy.
"""

import functools
import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from compare.contract.communication import ACTIVATION_GRADIENTS, ACTIVATIONS
from compare.contract.record import read_tensors
from compare.contract.request import Request, Rung
from compare.numerics.data import open_corpus
from compare.setup.presets import PRESETS, spread
from compare.side.ending import RunFailed
from compare.side.recording import Recording
from compare.spec.axes import CP, PP
from compare.spec.experiment import Data, Experiment, Layout, Model, Precision, Train
from compare.system.facts import has_ended
from tests.support.ranks import on_ranks_apart, rank_of
from tests.support.warm import run_forked
from torchpar import train
from torchpar.comm import process_groups
from torchpar.comm.collectives import Axis, Work, gather_equal
from torchpar.comm.nccl_like import BACKEND, NcclLike
from torchpar.launch import Rank, launch
from torchpar.measure.instruments import Instruments

RUNGS = (Rung.BATCH, Rung.GRADIENTS, Rung.FINAL_WEIGHTS)


@contextmanager
def group_of(rank: int, count: int) -> Generator[Axis | None]:
    """All of `count` ranks on the stand-in, as this rank sees them; None on other ranks."""
    number = len(list(Path().glob(f"group.*.{rank}")))
    Path(f"group.{number}.{rank}").touch()
    if rank >= count:
        yield None
        return
    with patch.dict(process_groups.BACKENDS, cpu=BACKEND):
        process_groups.join_ranks(rank_of(rank, count, Path(f"group.{number}").absolute()), "cpu")
    yield Axis.from_group(process_groups.world_group())
    process_groups.leave_group()
    assert not dist.is_initialized()


def experiment_of(preset: str, engine: str = "torch-manual") -> Experiment:
    """A training of a preset. No message of torch-compiler is of two layers: one layer is enough."""
    has_experts, layers = PRESETS[preset].ranks_per_ep > 0, 4 if PRESETS[preset].axis == PP else 2
    layers = 1 if engine == "torch-compiler" else layers
    sizes = {"n_layer": layers, "n_head": 4, "n_embd": 8, "block_size": 8, "vocab_size": 18}
    model = Model(**sizes, bias=True, n_experts=4 * has_experts)
    whole = Experiment(
        model=model,
        data=Data(source="synthetic"),
        train=Train(max_iters=2, batch_size=8, gradient_accumulation_steps=2),
        precision=Precision(dtype="float64"),
        layout=Layout(bucket_mb=0.002),
    )
    is_wide = PRESETS[preset].fixed > 1 or PRESETS[preset].axis in (CP, PP) or has_experts
    return spread(whole, preset, None if is_wide else 2)


def trained(
    rank: int, engine: str, experiment: Experiment, folder: Path
) -> dict[Rung, dict[str, np.ndarray]]:
    """The tensors of a run on the stand-in, on the first rank; {} on other ranks."""
    count, write_all = experiment.layout.devices, Recording._write

    def write(recording: Recording, *rungs: Rung) -> None:
        write_all(recording, *(rung for rung in rungs if rung in RUNGS))

    folder.mkdir(exist_ok=True)
    if rank >= count:
        return {}
    request = Request(
        engine=engine, experiment=experiment, ladder=True, corpus_sha256=open_corpus(experiment).sha256
    )
    here = rank_of(rank, count, (folder / "rendezvous").absolute())
    with ExitStack() as stack:
        stack.enter_context(patch.dict(process_groups.BACKENDS, cpu=BACKEND))
        for method in ("watch", "gradients"):  # half of the time
            stack.enter_context(patch.object(Instruments, method, nullcontext))
        stack.enter_context(patch.object(Recording, "finish"))
        stack.enter_context(patch.object(Recording, "_write", write))
        train.train(here, request=request, folder=folder)
    assert not dist.is_initialized()
    return {rung: read_tensors(folder, rung) for rung in RUNGS} if rank == 0 else {}


@functools.cache
def alone(model: Model) -> dict[Rung, dict[str, np.ndarray]]:
    whole = replace(spread(experiment_of("ddp"), "single"), model=model)
    return trained(0, "torch-manual", whole, Path(f"alone-{model.n_layer}-{model.n_experts}"))


OF_PYTORCH = {
    "torch-library": ("ddp", "zero1", "fsdp", "tp_sp", "fsdp_tp", "cp", "fsdp_ep", "pp_interleaved", "tp_pp"),
    "torch-compiler": ("ddp", "fsdp", "tp_sp", "cp", "fsdp_ep"),
}
"""One preset for each use of PyTorch's own collectives: every step of a DTensor takes milliseconds."""
CASES = [("torch-manual", preset) for preset in PRESETS if preset != "single"]
CASES += [(engine, preset) for engine, presets in OF_PYTORCH.items() for preset in presets]


@pytest.mark.parametrize(("engine", "preset"), CASES, ids=map("-".join, CASES))
@on_ranks_apart
def test_preset(rank: int, engine: str, preset: str) -> None:
    experiment = experiment_of(preset, engine)
    got = trained(rank, engine, experiment, Path(f"{engine}-{preset}"))
    if rank == 0:
        for rung, expected in alone(experiment.model).items():
            assert got[rung].keys() == expected.keys()
            for name, array in expected.items():
                np.testing.assert_allclose(
                    got[rung][name], array, rtol=1e-9, atol=1e-12, err_msg=f"{rung} {name}"
                )


@on_ranks_apart
def test_violations_are_errors(rank: int) -> None:
    with group_of(rank, 2) as pair:
        if not pair:
            return
        x = torch.arange(3.0) + rank
        work = pair.start_all_reduce(x)
        assert x.isnan().all()
        work.wait()
        assert x.tolist() == [1.0, 3.0, 5.0]

        shards = [torch.zeros(2), torch.zeros(2)]
        work = pair.start_all_gather(torch.zeros(4), shards[rank])
        shards[rank][0] = 1
        with pytest.raises(RuntimeError, match=r"all_gather of a tensor \(2,\), which was written to before"):
            work.wait()

        full = torch.ones(4)
        work = pair.start_reduce_scatter(torch.zeros(2), full)
        full.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="which was freed before"):
            work.wait()

        ids = torch.ones(3, dtype=torch.int64)
        work = pair.start_all_reduce(ids)
        assert (ids < 0).all()
        work.wait()

        with pytest.raises(ValueError, match="5 elements must be 2 times the 2 of a rank"):
            gather_equal(torch.zeros(5), torch.zeros(2))
        with pytest.raises(ValueError, match="must be contiguous"):
            dist.all_reduce(torch.zeros(2, 2).t())
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            pair.all_reduce(torch.ones(2).cpu())
        (of_first, _) = pair.all_gather_objects({"weight": torch.ones(4) * rank})
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            pair.all_reduce(of_first["weight"].view(2, 2))

        with pytest.raises(
            RuntimeError, match=r"rank . calls (all_reduce of 3|broadcast of 3), rank . calls"
        ):
            dist.all_reduce(x) if rank else dist.broadcast(x, 0)


@on_ranks_apart
def test_messages_have_one_order(rank: int) -> None:
    """A receive holds up everything behind it. Two groups, or a batch, do not wait for each other."""
    with group_of(rank, 2) as pair:
        if not pair:
            return
        other = Axis("other", size=2, rank=rank, group=dist.new_group([0, 1]))
        sent, received = torch.ones(2) * rank, torch.zeros(2)
        if rank == 0:
            works = [pair.start_receive(received, source=1), pair.start_send(sent, to=1)]
            other.all_reduce(torch.ones(1))
            assert not works[0].is_completed()
            assert not works[1].is_completed()
            other.all_reduce(torch.ones(1))
        else:
            other.all_reduce(torch.ones(1))
            other.all_reduce(torch.ones(1))
            works = [pair.start_send(sent, to=0), pair.start_receive(received, source=0)]
        for work in works:
            work.wait()
        assert received.tolist() == [1.0 - rank] * 2
        pair.start_shift(received, sent).wait()
        assert received.tolist() == [1.0 - rank] * 2


@on_ranks_apart
def test_interleaved_gradients_have_a_group_of_their_own(rank: int) -> None:
    """On NCCL a receive of a gradient would hold up the activations behind it."""
    preset, groups = "pp_interleaved", defaultdict[str, set[str]](set)
    start = Axis.start_send

    def start_send(axis: Axis, tensor: torch.Tensor, *, to: int, purpose: str = "") -> Work:
        assert axis.group is not None
        groups[purpose].add(axis.group.group_name)
        return start(axis, tensor, to=to, purpose=purpose)

    with patch.object(Axis, "start_send", start_send):
        trained(rank, "torch-manual", experiment_of(preset), Path("groups"))
    if rank < 2:
        assert not groups[ACTIVATIONS] & groups[ACTIVATION_GRADIENTS]


@on_ranks_apart
def test_future_is_late(rank: int) -> None:
    with group_of(rank, 2) as pair:
        if pair:
            x = torch.ones(2)
            future = dist.all_reduce(x, async_op=True).get_future()
            assert future.wait()[0].tolist() == x.tolist() == [2.0, 2.0]


def leave(rank: Rank, *, destroys: bool) -> None:
    """Rank 0 has its result and leaves; rank 1 waits for the same result later."""
    process_groups.BACKENDS["cpu"] = BACKEND
    process_groups.join_ranks(rank, "cpu")
    rank.at(0, "synchronisation")
    world = process_groups.world_group()
    assert isinstance(world, NcclLike)
    work = dist.all_reduce(torch.ones(2), async_op=True)
    while rank.rank == 1 and not destroys and not has_ended(world.peers[0]):
        time.sleep(0.01)
    work.wait()
    rank.at(0, "the end")
    if destroys:
        process_groups.leave_group()


def run_leave(destroys: bool) -> int:
    try:
        launch(functools.partial(leave, destroys=destroys), 2)
    except RunFailed as error:
        print(error.failure.message)
        return 1
    return 0


def test_rank_that_leaves_without_goodbye_breaks_the_others() -> None:
    done = run_forked(run_leave, False)
    assert done.returncode == 1
    assert "all_reduce: remote process exited: rank 0 did not call destroy_process_group" in done.stdout
    done = run_forked(run_leave, True)
    assert done.returncode == 0, done.stdout + done.stderr
