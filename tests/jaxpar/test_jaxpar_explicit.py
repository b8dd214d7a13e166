"""jax-explicit's step is traced, and not compiled: every operation has a type.

In tests/data/mutations.toml four casts are missing or wrong. The trace must fail for each.
"""

import pytest
from msgspec.structs import replace

from compare.spec.experiment import Layout, Model, edited
from jaxpar.programs import trace_train
from tests.support.jax_steps import engine_and_state, experiment_of

INTERLEAVED = Layout(pp=2, schedule="interleaved", chunks=2, microbatches=2)
ONE = Model(n_layer=4, n_head=1, n_embd=3, block_size=1, vocab_size=5)
TWO = replace(ONE, n_head=2, n_embd=2, block_size=2)
SMALLEST = {
    "pp": (INTERLEAVED, ONE),
    "fsdp_pp": (replace(INTERLEAVED, dp_shard=2, zero=3), ONE),
    "zero1": (Layout(dp_shard=2, zero=1), replace(ONE, n_embd=1, norm="rmsnorm")),
    "zero2": (Layout(dp_shard=2, dp_replicate=2, zero=2), ONE),
    "ddp_tp": (Layout(tp=2, dp_replicate=2), TWO),
    "fsdp_tp": (Layout(tp=2, dp_shard=2, zero=3), TWO),
}


@pytest.mark.parametrize("name", SMALLEST)
def test_dims_of_one_have_types(name):
    """One head, one position of a part, one row a replica: reshapes give the sharding of dims of one."""
    layout, model = SMALLEST[name]
    spec = experiment_of(layout, model=model, batch_size=layout.data_parallel * layout.microbatches)
    spec = edited(spec, {"train": {"loss_chunks": 1 if layout.pp > 1 else model.block_size}})
    trace_train(*engine_and_state("jax-explicit", spec))
