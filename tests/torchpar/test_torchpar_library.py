"""torchpar.library's layouts on four gloo ranks, in float64: PyTorch's wrappers composed, against one device.

The oracle is the plain GPT over the whole batch, PyTorch's own clipping and optimizer.
"""

from functools import partial

import msgspec
import pytest
from gpt_steps import ADAM, CONFIG, SGD, assert_cut, assert_same, backward, count, make_gpt, reference
from gpt_steps import make_parallel as make
from gpt_steps import train as train_by
from layouts import TORCH_LIBRARY as LAYOUTS
from ranks import on_ranks
from torch.distributed.device_mesh import DeviceMesh

from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, Layout
from torchpar import library
from torchpar.comm import process_groups
from torchpar.faults import incomplete_norms, unsummed_rows
from torchpar.library.tensor_parallel import split_layers
from torchpar.model import GPT

make_parallel, train = partial(make, library.parallelize), partial(train_by, library.parallelize)


def test_ledger(ranks):
    ranks.end()  # DTensor keeps what it planned for one mesh, groups and all, for a later equal one
    ranks.run(ledger)


@on_ranks
def ledger(rank: int) -> None:
    """FSDP2 gathers blocks twice and the root once; DTensor's activations and loss are seen too."""
    layout, parameter_bytes = LAYOUTS["zero3"], 8 * sum(p.numel() for p in make_gpt().parameters())
    parallel, mesh = make_parallel(msgspec.structs.replace(layout, remat="none"), rank, ADAM)
    seen = count(parallel, mesh)
    blocks = CONFIG.n_layer
    assert seen["reduce_scatter", "gradients"].calls == blocks + 1
    assert seen["all_gather", "parameters"].calls == 2 * (2 * blocks + 1)  # two passes
    padded = seen["reduce_scatter", "gradients"].bytes
    assert parameter_bytes <= padded <= parameter_bytes + 8 * 3 * 12 * len(parallel.parameters)
    parallel, mesh = make_parallel(Layout(tp=4), rank, ADAM)
    seen = count(parallel, mesh)
    # A pass: 2 a layer forward and backward, embedding, head; maximum, sum and target logit of the loss.
    assert seen["all_reduce", "activations"].calls == 2 * (2 * blocks + 1)
    assert seen["all_reduce", "loss"].calls == 2 * 3
    assert seen["all_reduce", "activation gradients"].calls == 2 * (2 * blocks + 1)


@pytest.mark.parametrize(
    ("experiment", "names"),
    [(ADAM, list(LAYOUTS)), (SGD, ["zero1", "fsdp_tp_sp"])],
    ids=["adamw", "sgd"],
)
@on_ranks
def test_every_layout_equals_one_device(rank: int, experiment: Experiment, names: list[str]) -> None:
    expected = reference(experiment)
    for name in names:
        got, parallel = train(LAYOUTS[name], rank, experiment)
        assert_same(got, expected, name)
        assert_cut(parallel, experiment, LAYOUTS[name], name)


@on_ranks
def test_mistakes_show(rank: int) -> None:
    expected = reference(ADAM, steps=1)["gradients"]
    with incomplete_norms():
        parallel, mesh = make_parallel(LAYOUTS["tp_sp"], rank, ADAM)
        backward(parallel, mesh, 0)
    got = parallel.full(parallel.gradients())
    name = "transformer.ln_f.weight"
    assert (got[name] - expected[name]).abs().max() > 1e-3
    right, mesh = make_parallel(LAYOUTS["tp"], rank, ADAM)
    with unsummed_rows():
        wrong, _ = make_parallel(LAYOUTS["tp"], rank, ADAM)
    assert abs(backward(right, mesh, 0) - backward(wrong, mesh, 0)).item() > 1e-3


@on_ranks
def test_a_vocabulary_without_enough_rows_is_refused(rank: int) -> None:
    mesh = DeviceMesh.from_group(process_groups.world_group(), "cpu", mesh_dim_names=("tp",))
    tiny = GPT(msgspec.structs.replace(CONFIG, vocab_size=5))
    with pytest.raises(ValueError, match="tp = 4 leaves a rank without any of vocab_size = 5"):
        split_layers(tiny, mesh)


def test_what_ddp_cannot_do_is_refused_by_name():
    engine = ENGINES["torch-library"]
    with pytest.raises(ExperimentError, match=r"layout.zero = 1 with layout.tp = 2: .*DTensor"):
        engine.require(Layout(dp_shard=2, tp=2, zero=1))
    engine.require(Layout(dp_shard=2, tp=2, zero=2))
    for context in ("ring", "ulysses"):
        with pytest.raises(ExperimentError, match="three of CUDA's kernels, none of them for float64"):
            engine.require(Layout(cp=2, context=context))
    with pytest.raises(ExperimentError, match="zero_bubble has backward in two halves"):
        engine.require(Layout(cp=2, pp=2, schedule="zero_bubble", microbatches=2))
    assert engine.gradient_sync_for(Layout(dp_replicate=2, tp=2)) == "fsdp2"
    assert engine.gradient_sync_for(Layout(dp_replicate=2)) == "ddp"
