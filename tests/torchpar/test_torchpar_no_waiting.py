"""A step of torch-manual never asks a device for a value: on a GPU the host would wait for it.

Seen by the dispatcher, on four gloo ranks: a value on its way to Python, or a shape that depends on one.
"""

from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from ranks import RANKS, on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from compare.spec.experiment import Experiment, Layout, Model
from torchpar.comm.mesh import make_mesh
from torchpar.manual import megatron, parallelize
from torchpar.model import GPT
from torchpar.optimizer import make_optimizer, optimizer_step
from torchpar.parallel_model import ParallelModel
from torchpar.run import RankBatch

_aten = torch.ops.aten
WAITING = {_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.equal.default}
SMALL = Model(n_layer=4, n_embd=32, block_size=16, vocab_size=64)
LAYOUTS = [
    Layout(dp_replicate=RANKS),
    *(Layout(dp_shard=RANKS, zero=zero) for zero in (1, 2, 3)),
    *(Layout(tp=RANKS, sequence_parallel=split) for split in (False, True)),
    *(Layout(pp=RANKS, microbatches=4, schedule=name) for name in ("1f1b", "zero_bubble")),
]


class Waits(TorchDispatchMode):
    """Counts operations for which a host waits."""

    def __init__(self):
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        # With a mask for an index the shape of the result depends on values.
        masks = func is _aten.index.Tensor and any(t is not None and t.dtype == torch.bool for t in args[1])
        self.seen[str(func)] += func in WAITING or masks
        return func(*args, **(kwargs or {}))


def step(parallel: ParallelModel, experiment: Experiment, number: int, *, waits: bool = False) -> None:
    ids = torch.arange(4 * 16).view(1, 4, 16) % experiment.model.vocab_size
    if parallel.run_pipeline:
        parallel.run_pipeline(RankBatch(ids, ids), nullcontext)
    else:
        parallel.module(ids[0], ids[0])[1].backward()
    parallel.finish_gradient_synchronization()
    optimizer_step(parallel, experiment.optimizer, number, waits=waits)


@on_ranks
def test_no_step_waits_for_a_value(rank: int) -> None:
    for layout in LAYOUTS:
        experiment = Experiment(
            model=Model(n_layer=4, n_embd=32, block_size=16, vocab_size=64), layout=layout
        )
        mesh = make_mesh(layout, rank=rank, device=torch.device("cpu"))
        torch.manual_seed(0)
        make = partial(make_optimizer, experiment=experiment)
        parallel = parallelize(GPT(experiment.model), mesh=mesh, layout=layout, make_optimizer=make)
        step(parallel, experiment, 0)  # the first tries the optimizer
        with Waits() as waits, patch.object(megatron, "require_inside"):  # on a GPU it does not wait
            step(parallel, experiment, 1)
        assert not +waits.seen, (layout, +waits.seen)
        with waits, patch.object(megatron, "require_inside"):
            step(parallel, experiment, 2, waits=True)
        assert (+waits.seen).total() == 1, (layout, +waits.seen)  # its look at the norm is noticed
