"""The examples in the docstrings of torchpar's public classes run, on four gloo ranks."""

import doctest
from functools import partial
from types import ModuleType

import pytest
import torch
from ranks import on_ranks
from torch import nn

from compare.pipeline.schedules import make_schedule
from torchpar import swap
from torchpar.comm.collectives import Axis
from torchpar.guards import data_parallel, fully_sharded, sharded_optimizer
from torchpar.manual import pipeline_parallel, tensor_parallel
from torchpar.manual.megatron import mappings, vocab_parallel

COMMON = {"torch": torch, "nn": nn, "partial": partial, "Axis": Axis, "make_schedule": make_schedule}
EXAMPLES = {
    "FSDP": fully_sharded,
    "ShardedOptimizer": sharded_optimizer,
    "DataParallel": data_parallel,
    "ColumnParallelLinear": tensor_parallel,
    "RowParallelLinear": tensor_parallel,
    "VocabParallelEmbedding": vocab_parallel,
    "vocab_parallel_cross_entropy": vocab_parallel,
    "PipelineParallel": pipeline_parallel,
    "swap": swap,
    "": mappings,  # the module's own
}


def public_names() -> dict[str, object]:
    """Names that an example may use without saying where they are from."""
    modules: list[ModuleType] = [*EXAMPLES.values()]
    return {**COMMON, **{name: value for module in modules for name, value in vars(module).items()}}


@pytest.mark.parametrize("name", EXAMPLES)
@on_ranks
def test_an_example_runs(rank: int, name: str) -> None:
    torch.manual_seed(0)  # what is to be split is the same on all ranks
    module = EXAMPLES[name]
    example = getattr(module, name) if name else module
    (test,) = doctest.DocTestFinder(recurse=False).find(example, name or "module", globs=public_names())
    assert len(test.examples) >= 3
    said: list[str] = []
    failed, _ = doctest.DocTestRunner().run(test, out=said.append)
    assert not failed, "".join(said)
