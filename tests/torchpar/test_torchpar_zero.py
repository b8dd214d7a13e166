"""torch-manual's data parallelism and ZeRO on four gloo ranks, in float64: against one device, and in bytes.

Sizes that do not divide by the ranks, and vectors with fewer elements than a shard is long.
"""

import pytest
from gpt_steps import ADAM, SGD, assert_same, backward, make_gpt, make_parallel, reference, train
from layouts import TORCH_SHARED, TORCH_ZERO
from msgspec.structs import replace
from ranks import counted, on_ranks

from compare.contract.communication import LOSS
from compare.judge.closed_forms.communication import communication
from compare.spec.axes import DP_REPLICATE
from compare.spec.experiment import Experiment, Layout, Precision, Train
from torchpar import manual
from torchpar.measure.memory import resident_bytes
from torchpar.optimizer import optimizer_step
from torchpar.parallel_model import ParallelModel

LAYOUTS = TORCH_ZERO | {name: TORCH_SHARED[name] for name in ("ddp", "tp_sp", "fsdp_tp")}
STEP = Train(batch_size=4, gradient_accumulation_steps=2)
BYTES = 8 * sum(p.numel() for p in make_gpt().parameters())


@pytest.mark.parametrize("experiment", [ADAM, SGD], ids=["adamw", "sgd"])
@on_ranks
def test_every_layout_equals_one_device(rank: int, experiment: Experiment) -> None:
    expected = reference(experiment)
    for name, layout in LAYOUTS.items():
        got, parallel = train(manual.parallelize, layout, rank, experiment)
        assert_same(got, expected, name)
        if experiment is ADAM and layout.zero:
            assert_sharded(parallel, layout, name)


def assert_sharded(parallel: ParallelModel, layout: Layout, name: str) -> None:
    """About a share of what the stage splits, and all of the rest; nothing is padded."""
    if layout.tp > 1:
        return
    moments = [
        value for entry in parallel.optimizer.state.values() for value in entry.values() if value.dim()
    ]
    parameters = [*parallel.module.parameters(), *parallel.parameters.values()]
    for held, whole, is_cut in (
        (resident_bytes(parameters), BYTES, layout.zero == 3),
        (resident_bytes(moments), 2 * BYTES, True),
    ):
        assert held == pytest.approx(whole / (layout.dp_shard if is_cut else 1), rel=0.05), name


@on_ranks
def test_what_is_sent_is_the_closed_form(rank: int) -> None:
    for name, layout in LAYOUTS.items():
        if layout.tp > 1:
            continue  # of a vocabulary that tp does not divide it is not: see test_torchpar_tensor_parallel
        parallel, mesh = make_parallel(manual.parallelize, layout, rank, ADAM)
        for step in range(2):  # what the first one begins with is not gathered
            with counted() as counts:
                backward(parallel, mesh, step)
                optimizer_step(parallel, ADAM.optimizer, step)
        sent = {tuple(call): size for call, size in counts.items()}
        experiment = replace(ADAM, layout=layout, train=STEP, precision=Precision(dtype="float64"))
        for item, size in communication("torch-manual", experiment).items():
            off = 0.01 * (item[1] == DP_REPLICATE)  # shards that cannot all be equal
            if item[2] != LOSS:
                assert sent.pop(item) == pytest.approx(size, rel=off), (name, item)
        assert all(size <= 8 for size in sent.values()), (name, sent)  # the norm, nothing else
