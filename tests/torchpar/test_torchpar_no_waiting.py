"""A step of torch-manual waits for each collective that it begins, and never for a value of a device.

On four gloo ranks. A dispatch mode finds values that Python reads, for which the host would wait on a GPU,
and shapes that depend on values.
"""

from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compare.spec.experiment import Experiment, Layout, Model
from tests.support.gpt_steps import make_parallel, update
from tests.support.ranks import RANKS, on_ranks
from torchpar.batch import RankBatch
from torchpar.comm.collectives import Axis
from torchpar.engine import Engine
from torchpar.manual import make_engine
from torchpar.model import GPT

_aten = torch.ops.aten
WAITING = {_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.equal.default}
LAYOUTS = {
    "ddp": Layout(dp_replicate=RANKS),
    **{f"zero{zero}": Layout(dp_shard=RANKS, zero=zero) for zero in (1, 2, 3)},
    **{f"tp_{split}": Layout(tp=RANKS, sequence_parallel=split) for split in (False, True)},
    **{name: Layout(pp=RANKS, microbatches=4, schedule=name) for name in ("1f1b", "zero_bubble")},
}


class Waits(TorchDispatchMode):
    """Counts operations for which the host waits."""

    def __init__(self):
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        # A mask as an index: the shape of the result depends on values.
        masks = func is _aten.index.Tensor and any(t is not None and t.dtype == torch.bool for t in args[1])
        self.found[str(func)] += func in WAITING or masks
        return func(*args, **(kwargs or {}))


@contextmanager
def unfinished_collectives() -> Generator[list[str]]:
    """The collectives that have begun inside, by method, without those that were waited for."""
    begun: list[str] = []

    def watched(name: str, start):
        def started(*arguments, **options):
            work = start(*arguments, **options)
            begun.append(name)

            def wait() -> object:
                begun.remove(name)
                return work.wait()

            return SimpleNamespace(wait=wait)

        return started

    with ExitStack() as stack:
        for name, start in list(vars(Axis).items()):
            if name.startswith("start_"):
                stack.enter_context(patch.object(Axis, name, watched(name, start)))
        yield begun


def step(engine: Engine, experiment: Experiment, number: int, *, waits: bool = False) -> None:
    ids = torch.arange(4 * 16).view(1, 4, 16) % experiment.model.vocab_size
    if engine.run_pipeline:
        engine.run_pipeline(RankBatch(ids, ids), nullcontext)
    else:
        engine.module(ids[0], ids[0])[1].backward()
    engine.finish_gradients()
    norm = update(engine, experiment.optimizer, number)
    assert not waits or norm.isfinite()


@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks
def test_step_waits_for_no_value(rank: int, name: str) -> None:
    model = Model(n_layer=4, n_embd=32, block_size=16, vocab_size=64)
    experiment = Experiment(model=model, layout=LAYOUTS[name])
    torch.manual_seed(0)
    engine, _ = make_parallel(make_engine, experiment.layout, rank, experiment, GPT(model))
    with unfinished_collectives() as begun:  # the first step makes the optimizer's state
        step(engine, experiment, 0)
    assert not begun
    with Waits() as waits:
        step(engine, experiment, 1)
    assert not +waits.found
    with waits:
        step(engine, experiment, 2, waits=True)
    assert (+waits.found).total() == 1, +waits.found  # reading the norm is found
