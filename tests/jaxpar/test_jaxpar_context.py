"""Context parallelism: every way against one device, in float64."""

import pytest
from jax_steps import MODEL, two_steps, worst_errors
from msgspec.structs import replace

from compare.spec.experiment import Layout

SPEC = replace(MODEL, n_layer=2, n_head=4, block_size=16, dropout=0.3)
SP = {"tp": 2, "sequence_parallel": True}
CASES = {
    "compiler allgather, zigzag, cut by tp": Layout(cp=2, zigzag=True, **SP),
    "compiler ulysses": Layout(cp=2, context="ulysses", dp_shard=2, zero=3),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name):
    outcome = two_steps(f"jax-{name.split()[0]}", CASES[name], model=SPEC)
    errors = worst_errors(outcome, SPEC)
    assert max(errors.values()) <= 1e-10, errors  # measured: 3e-14
    sent = {entry.kind for entry in outcome.ledger if entry.axis == "cp" and entry.purpose == "activations"}
    assert ("all_to_all" in sent) == (CASES[name].context == "ulysses")
