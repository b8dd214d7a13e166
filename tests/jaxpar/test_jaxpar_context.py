"""Context parallelism: attention of each way against PyTorch's, and steps against one device, in float64."""

from functools import partial

import jax
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P
from msgspec.structs import replace

from compare.numerics.context import order_of_positions
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Layout
from jaxpar.attention import dense_attention
from jaxpar.comm.collectives import per_device
from jaxpar.comm.mesh import make_mesh
from jaxpar.manual.context_parallel import exchanged_attention, gathered_attention
from jaxpar.manual.ring import ring_attention
from tests.support.jax_steps import MODEL, two_steps, worst_errors

DROPPED = replace(MODEL, n_layer=2, n_head=4, block_size=16, dropout=0.3)
UNDROPPED = replace(DROPPED, dropout=0.0, n_kv_head=2, position="rope")
CASES = {
    "compiler allgather": (Layout(cp=2, zigzag=True, tp=2, sequence_parallel=True), DROPPED),
    "compiler ulysses": (Layout(cp=2, context="ulysses", dp_shard=2, zero=3), DROPPED),
    "explicit allgather": (Layout(cp=2, zigzag=True, dp_shard=2, zero=3), UNDROPPED),
    "explicit ulysses": (Layout(cp=2, context="ulysses", tp=2, sequence_parallel=True), DROPPED),
    "manual allgather": (Layout(cp=2, zigzag=True, pp=2, microbatches=2), DROPPED),
    "manual ulysses": (Layout(cp=2, context="ulysses", tp=2, sequence_parallel=True), DROPPED),
    "manual ring": (Layout(cp=2, context="ring", zigzag=True, dp_replicate=2), UNDROPPED),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name):
    engine, way = name.split()
    layout, model = CASES[name]
    outcome = two_steps(f"jax-{engine}", layout, model=model)
    errors = worst_errors(outcome, model)
    assert max(errors.values()) <= 1e-10, errors  # measured: 3e-14
    kind = {"allgather": "all_gather", "ulysses": "all_to_all", "ring": "permute"}[way]
    purposes = {e.purpose for e in outcome.ledger if e.axis == "cp"}
    assert kind in {e.kind for e in outcome.ledger if e.axis == "cp" and e.purpose == "activations"}
    assert (
        engine == "compiler" or "activation gradients" in purposes
    )  # of K and V, which 16 bits leave narrow


WAYS = {
    "allgather": Layout(cp=4),
    "allgather zigzag": Layout(cp=4, zigzag=True),
    "ulysses": Layout(cp=4, context="ulysses"),
    "ring": Layout(cp=4, context="ring"),
    "ring zigzag": Layout(cp=4, context="ring", zigzag=True),
}


@pytest.mark.parametrize("layout", WAYS.values(), ids=WAYS)
def test_attention_equals_pytorch(layout):
    """The result and the gradients of q, k and v, on four devices; four heads have two of keys and values."""
    draw = np.random.default_rng(0).standard_normal
    q, k, v, g = (draw((2, 16, heads, 4)) for heads in (8, 4, 4, 8))
    tensors = [torch.from_numpy(x).transpose(1, 2).requires_grad_() for x in (q, k, v)]
    y = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    right = [y, *torch.autograd.grad(y, tensors, torch.from_numpy(g).transpose(1, 2))]

    order_T = order_of_positions(16, layout)
    way = {
        "allgather": partial(gathered_attention, order_T=order_T),
        "ulysses": exchanged_attention,
        "ring": partial(ring_attention, layout=layout),
    }[layout.context]

    def forward_and_back(q, k, v, g):
        y, back = jax.vjp(partial(way, dense_attention, factor=None), q, k, v)
        return y, *back(g)

    spec = P(None, "cp")
    mesh = make_mesh(layout, platform="cpu")
    on_four = jax.jit(per_device(forward_and_back, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec))
    found = on_four(*(x[:, order_T] for x in (q, k, v, g)))
    for name, x, expected in zip("yqkv", found, right, strict=True):
        back_BTHD = np.asarray(x)[:, order_T.argsort()]
        expected_BTHD = expected.detach().transpose(1, 2).numpy()
        np.testing.assert_allclose(back_BTHD, expected_BTHD, atol=1e-13, err_msg=name)


RING = Layout(cp=2, context="ring")


@pytest.mark.parametrize(
    ("engine", "layout", "reason"),
    [
        ("jax-compiler", RING, "an order in time"),
        ("jax-explicit", RING, "an order in time"),
        ("jax-manual", replace(RING, pp=2, microbatches=2), "some stages are idle"),
    ],
    ids=["compiler", "explicit", "pipeline"],
)
def test_ring_is_rejected(engine, layout, reason):
    assert reason in ENGINES[engine].why_not(layout)
    assert ENGINES["jax-manual"].why_not(RING) == ""
