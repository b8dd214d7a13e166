"""Fully sharded training needs memory for shards and two gathered layers, by XLA's own account.

The model is wide and its batch is small, so activations are small compared to parameters. Two depths separate
the memory of each layer from the constant memory.
"""

import pytest

from compare.numerics.parameters import parameter_table
from compare.spec.experiment import Experiment, Layout, Model, Optimizer, Precision, Train
from jaxpar.programs import compile_program, trace_train
from tests.support.jax_steps import engine_and_state

SHARDS, DEPTHS = 4, (4, 12)
ACTIVATIONS = 0.1
"""Limit of activations, embeddings and batch, as a share of a layer's bytes."""


def temporary_bytes(name: str, n_layer: int, *, reshard_after_forward: bool) -> tuple[int, int]:
    """Bytes that one device allocates within a step, and bytes of a whole layer's parameters."""
    experiment = Experiment(
        model=Model(n_layer=n_layer, n_head=2, n_embd=64, block_size=2, vocab_size=16, bias=True),
        train=Train(batch_size=SHARDS, gradient_accumulation_steps=1),
        optimizer=Optimizer(name="sgd", momentum=0.0),
        precision=Precision(dtype="float32"),
        layout=Layout(dp_shard=SHARDS, zero=3, reshard_after_forward=reshard_after_forward),
    )
    engine, state = engine_and_state(name, experiment)
    analysis = compile_program(engine, trace_train(engine, state)).memory_analysis()
    table = parameter_table(experiment.model)
    layer = sum(p.size for p in table if p.name.startswith("blocks.0.")) * 4
    return analysis.temp_size_in_bytes, layer


@pytest.mark.usefixtures("without_x64")
@pytest.mark.parametrize("engine", ["jax-compiler", "jax-manual"])
def test_zero3_has_two_gathered_layers(engine):
    shallow, deep = DEPTHS
    (few, layer), (many, _) = (temporary_bytes(engine, depth, reshard_after_forward=True) for depth in DEPTHS)
    per_layer = (many - few) / (deep - shallow)
    # Gradient shards, as the scan stacks them and as the update reads them: never a gathered layer.
    assert per_layer <= (2 / SHARDS + ACTIVATIONS) * layer
    assert few - per_layer * shallow <= (2 + ACTIVATIONS) * layer
    kept, _ = temporary_bytes(engine, deep, reshard_after_forward=False)
    assert kept >= deep * layer  # SHARD_GRAD_OP keeps every gathered layer until backward
