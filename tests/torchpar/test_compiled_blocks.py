"""Blocks that torch.compile compiles by themselves, on four gloo ranks, in float64, against one device.

The backend is aot_eager: it traces as inductor does, and needs no C++ compiler.
"""

import pytest
import torch
from msgspec.structs import replace

from compare.contract.work import ObservedWork
from compare.spec.experiment import Layout
from tests.support.gpt_steps import ADAM, CONFIG, assert_same, backward, count, reference, train
from tests.support.ranks import on_ranks
from torchpar import compilation
from torchpar.train import MAKE_ENGINE

LAYOUTS = {
    "torch-manual": {
        "ddp": Layout(dp_replicate=4),
        "zero3": Layout(dp_shard=4, zero=3, remat="full"),
        "fsdp_tp_sp": Layout(dp_shard=2, tp=2, zero=3, sequence_parallel=True, remat="dots"),
        "cp_tp": Layout(cp=2, tp=2, zigzag=True),
        "ulysses": Layout(cp=2, dp_replicate=2, context="ulysses"),
    },
    "torch-library": {
        "ddp_cp": Layout(dp_replicate=2, cp=2, zigzag=True),
        "fsdp_tp_sp": Layout(dp_shard=2, tp=2, zero=3, sequence_parallel=True, remat="dots"),
        "zero3": Layout(dp_shard=4, zero=3, remat="full"),
    },
}
CASES = [(engine, name) for engine, layouts in LAYOUTS.items() for name in layouts]


@pytest.mark.parametrize(("engine", "name"), CASES)
@on_ranks
def test_compiled_blocks_equal_one_device(rank: int, engine: str, name: str) -> None:
    torch._dynamo.reset()
    compilation.BACKEND_OF_BLOCKS = "aot_eager"
    layout = replace(LAYOUTS[engine][name], compile="block")
    got, parallel = train(MAKE_ENGINE[engine], layout, rank, ADAM)
    assert_same(got, reference(ADAM), name)
    work = parallel.compiled(ObservedWork(products={}, forward={"activations": 1}, again={}, logits_positions=[]))
    print(work)
