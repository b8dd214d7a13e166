"""A step of torch-manual waits for each collective that it begins, and never for a value of a device.

On four gloo ranks. A dispatch mode finds values that Python reads, and shapes that depend on values: for both
the host would wait on a GPU. It also finds copies of Python's values to the device.
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
from torchpar.weights import empty_model

_aten = torch.ops.aten
WAITING = {
    _aten._local_scalar_dense.default,
    _aten.nonzero.default,
    _aten.equal.default,
    _aten.bincount.default,
    _aten.lift_fresh.default,  # torch.tensor of Python's values
}
LAYOUTS = {
    "ddp": Layout(dp_replicate=RANKS),
    **{f"zero{zero}": Layout(dp_shard=RANKS, zero=zero) for zero in (1, 2, 3)},
    **{f"tp_{split}": Layout(tp=RANKS, sequence_parallel=split) for split in (False, True)},
    **{name: Layout(pp=RANKS, microbatches=4, schedule=name) for name in ("1f1b", "zero_bubble")},
    **{
        way: Layout(cp=RANKS, context=way, zigzag=way != "ulysses")
        for way in ("allgather", "ring", "ulysses")
    },
    "experts": Layout(dp_replicate=RANKS),
    "ep": Layout(dp_shard=RANKS, ep=RANKS),
}


class Waits(TorchDispatchMode):
    """Counts operations for which the host waits."""

    def __init__(self):
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        # A mask as an index: the shape of the result depends on values.
        masks = func is _aten.index.Tensor and any(t is not None and t.dtype == torch.bool for t in args[1])
        repeats = func is _aten.repeat_interleave.Tensor and (kwargs or {}).get("output_size") is None
        self.found[str(func)] += func in WAITING or masks or repeats
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self.lists = patch.object(torch.Tensor, "tolist", self.noted(torch.Tensor.tolist))
        self.lists.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.lists.stop()
        super().__exit__(*error)

    def noted(self, tolist):
        def to_list(tensor: torch.Tensor) -> list:
            self.found["tolist"] += 1
            return tolist(tensor)

        return to_list


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
    model, layout = experiment.model, experiment.layout
    ids = torch.arange(4 * 16).view(1, 4, 16)[..., : 16 // layout.cp] % model.vocab_size
    keys_B2 = torch.ones(4, 2, dtype=torch.int32) if model.dropout else None
    if engine.run_pipeline:
        engine.run_pipeline(RankBatch(ids, ids), nullcontext)
    else:
        engine.module(ids[0], ids[0], keys_B2)[1].backward()
    engine.finish_gradients()
    norm = update(engine, experiment.optimizer, number)
    assert not waits or norm.isfinite()


@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks
def test_step_waits_for_no_value(rank: int, name: str) -> None:
    layout, n_experts = LAYOUTS[name], RANKS if name in ("experts", "ep") else 0
    model = Model(
        n_layer=4,
        n_embd=32,
        block_size=16,
        vocab_size=64,
        position="rope" if layout.cp > 1 else "learned",
        dropout=0.1 if layout.cp > 1 and layout.context != "ring" else 0.0,
        n_experts=n_experts,
    )
    experiment = Experiment(model=model, layout=layout)
    torch.manual_seed(0)
    gpt = GPT(model)
    for expert in (p for p in gpt.parameters() if n_experts):  # a GPT leaves the memory of experts as it is
        torch.nn.init.normal_(expert, std=0.1)
    engine, _ = make_parallel(make_engine, layout, rank, experiment, gpt)
    with unfinished_collectives() as begun:  # the first step makes the optimizer's state
        step(engine, experiment, 0)
    assert not begun
    with Waits() as waits:
        step(engine, experiment, 1)
    # The sizes of products on a CPU, or of messages: once in each layer with experts.
    expected = Counter(tolist=model.n_layer) if n_experts else Counter()
    assert +waits.found == expected
    waits.found.clear()
    with waits:
        step(engine, experiment, 2, waits=True)
    assert (+waits.found - expected).total() == 1, +waits.found  # reading the norm is found


def test_rotation_is_copied_once():
    """The whole model on a device of its own kind: no operator of a forward reads memory of the host."""
    experiment, hosts = Experiment(model=Model(n_layer=1, position="rope")), list[str]()

    class Hosts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
            hosts.extend(str(func) for x in args if isinstance(x, torch.Tensor) and x.device.type == "cpu")
            return func(*args, **(kwargs or {}))

    model = empty_model(experiment, torch.device("meta"))
    with Hosts():
        model(*torch.zeros(2, 1, experiment.model.block_size, dtype=torch.int64, device="meta"))
    assert not hosts
