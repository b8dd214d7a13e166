"""The stand-in for NCCL, and whole trainings of every preset on it.

Each training is compared with the plain GPT on one device, which another file compares with NumPy.
"""

import functools
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from compare.contract.record import read_record, read_tensors
from compare.contract.request import Request, Rung
from compare.numerics.data import open_corpus
from compare.setup.presets import PRESETS, spread
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Data, Experiment, Layout, Model, Precision, Train
from tests.support.ranks import CPU, on_ranks_apart, rank_of
from torchpar import train
from torchpar.comm import process_groups
from torchpar.comm.collectives import Axis
from torchpar.comm.mesh import make_mesh
from torchpar.comm.nccl_like import BACKEND

RUNGS = (Rung.BATCH, Rung.GRADIENTS, Rung.FIRST_WEIGHTS, Rung.FIRST_M, Rung.FINAL_WEIGHTS)


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
    dist.barrier()
    dist.destroy_process_group()


def experiment_of(preset: str) -> Experiment:
    has_experts = PRESETS[preset].ranks_per_ep > 0
    model = Model(
        n_layer=4, n_head=4, n_embd=8, block_size=8, vocab_size=18, bias=True, n_experts=4 * has_experts
    )
    whole = Experiment(
        model=model,
        data=Data(source="synthetic"),
        train=Train(max_iters=2, batch_size=8, gradient_accumulation_steps=2),
        precision=Precision(dtype="float64"),
        layout=Layout(bucket_mb=0.002),
    )
    return spread(whole, preset)


def trained(rank: int, engine: str, experiment: Experiment, folder: Path) -> dict[Rung, dict[str, np.ndarray]]:
    """The tensors of a run on the stand-in, on the first rank; {} on other ranks."""
    count = experiment.layout.devices
    folder.mkdir(exist_ok=True)
    if rank >= count:
        return {}
    request = Request(
        engine=engine, experiment=experiment, ladder=True, corpus_sha256=open_corpus(experiment).sha256
    )
    with patch.dict(process_groups.BACKENDS, cpu=BACKEND):
        here = rank_of(rank, count, (folder / "rendezvous").absolute())
        train.train(here, request=request, folder=folder)
    assert not dist.is_initialized()
    return {rung: read_tensors(folder, rung) for rung in RUNGS} if rank == 0 else {}


@functools.cache
def alone(model: Model) -> dict[Rung, dict[str, np.ndarray]]:
    preset = "ep" if model.n_experts else "single"
    whole = spread(experiment_of(preset), "single")
    return trained(0, "torch-manual", whole, Path(f"alone-{model.n_experts}"))


CASES = [
    (engine, preset)
    for engine in ("torch-manual", "torch-library", "torch-compiler")
    for preset in PRESETS
    if preset != "single" and not ENGINES[engine].why_not(experiment_of(preset).layout)
]


@pytest.mark.parametrize(("engine", "preset"), CASES, ids=map("-".join, CASES))
@on_ranks_apart
def test_preset(rank: int, engine: str, preset: str) -> None:
    experiment = experiment_of(preset)
    got = trained(rank, engine, experiment, Path(f"{engine}-{preset}"))
    if rank == 0:
        for rung, expected in alone(experiment.model).items():
            assert got[rung].keys() == expected.keys()
            for name, array in expected.items():
                np.testing.assert_allclose(got[rung][name], array, rtol=1e-9, atol=1e-12, err_msg=f"{rung} {name}")
