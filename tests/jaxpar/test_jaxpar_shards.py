"""Who holds what in jaxpar: the description against what each device really holds, bit for bit."""

import jax
import numpy as np
import pytest
from jax_steps import experiment_of
from layouts import JAX, JAX_COMPILER_PIPELINES, JAX_MANUAL_PIPELINES

from compare.numerics.parameters import parameter_table
from compare.numerics.shards import assemble, cut
from compare.numerics.weights import Given
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import Layout, Model
from jaxpar import weights
from jaxpar.comm.mesh import make_mesh
from jaxpar.remat import resolve_remat
from jaxpar.setup import prepare
from jaxpar.shards import held, shards
from jaxpar.training_step import ShardedStep

# Four devices divide no width, vocabulary or number of positions: most shards are padded.
MODEL = Model(n_layer=4, n_head=2, n_embd=6, block_size=9, vocab_size=13, bias=True)
LAYOUTS = {
    "one": Layout(),
    "ddp": Layout(dp_replicate=4),
    **{name: JAX[name] for name in ("zero2_tp", "zero3", "hsdp", "tp_sp", "fsdp_tp_sp")},
}
ENGINE_NAMES = [name for name, engine in STUDIED.items() if engine.side == "jaxpar"]
CASES = [
    *((engine, name, layout) for engine in ENGINE_NAMES for name, layout in LAYOUTS.items()),
    *(("jax-manual", f"pp {name}", layout) for name, layout in JAX_MANUAL_PIPELINES.items()),
    *(("jax-compiler", f"pp {name}", layout) for name, layout in JAX_COMPILER_PIPELINES.items()),
]


def random_weights(model: Model) -> dict[str, np.ndarray]:
    """No two elements are equal, so that nothing may be elsewhere than it is said to be."""
    generator = np.random.default_rng(0)
    return {row.name: generator.standard_normal(row.shape) for row in parameter_table(model)}


def placed(engine: str, layout: Layout, model: Model = MODEL) -> tuple[ShardedStep, dict]:
    spec = experiment_of(layout, model=model, batch_size=8)
    mesh = make_mesh(layout, platform="cpu")
    remat = resolve_remat(layout)
    sharded, state = prepare(engine, spec, mesh=mesh, remat=remat, initial=Given(random_weights(model)))
    return sharded, state.params


@pytest.mark.parametrize(
    ("engine", "layout"), [(e, layout) for e, _, layout in CASES], ids=[f"{e} {n}" for e, n, _ in CASES]
)
def test_every_device_holds_what_is_said(engine, layout):
    sharded, params = placed(engine, layout)
    whole = random_weights(MODEL)
    stored = sharded.pad(weights.from_canonical(whole, MODEL))
    trees = {"params": params} | {
        kind: jax.device_put(stored, getattr(sharded, kind)) for kind in ("moments", "accumulated")
    }
    for kind, tree in trees.items():
        found = list(held(tree, sharded.placements, MODEL))
        said = shards(sharded.placements, getattr(sharded, kind), MODEL)
        assert [shard for shard, _ in found] == said
        assert {shard.device for shard in said} == set(range(layout.devices))
        for shard, array in found:
            np.testing.assert_array_equal(array, cut(whole[shard.name], shard), err_msg=f"{kind} {shard}")
        for name, tensor in whole.items():
            mine = [(shard, array) for shard, array in found if shard.name == name]
            once = [(shard, array) for shard, array in mine if not shard.replica]
            np.testing.assert_array_equal(assemble(tensor.shape, mine), tensor)
            np.testing.assert_array_equal(assemble(tensor.shape, once), tensor)
            assert sum(array.size for _, array in once) == tensor.size, name


def of(name: str, layout: Layout, kind: str = "params", model: Model = MODEL) -> list[tuple]:
    sharded, _ = placed("jax-manual", layout, model)
    found = shards(sharded.placements, getattr(sharded, kind), model)
    return [(s.device, s.offset, s.shape, s.replica) for s in found if s.name == name]


def test_some_by_hand():
    up = "blocks.3.mlp.up.weight"  # (6, 24)
    assert of(up, Layout(dp_shard=2, zero=3, tp=2)) == [
        (0, (0, 0), (3, 12), 0),
        (1, (0, 12), (3, 12), 0),
        (2, (3, 0), (3, 12), 0),
        (3, (3, 12), (3, 12), 0),
    ]
    weights_at_rest, moments = (of(up, Layout(dp_shard=2, zero=1), kind) for kind in ("params", "moments"))
    assert weights_at_rest == [(0, (0, 0), (6, 24), 0), (1, (0, 0), (6, 24), 1)]
    assert moments == [(0, (0, 0), (3, 24), 0), (1, (3, 0), (3, 24), 0)]
    assert of("embedding.token", Layout(tp=2)) == [(0, (0, 0), (7, 6), 0), (1, (7, 0), (6, 6), 0)]  # of 13
    # Two stages on each device: layers 0 and 2 on the first, 1 and 3 on the second.
    interleaved = Layout(pp=2, schedule="interleaved", chunks=2, microbatches=2)
    assert [of(f"blocks.{n}.mlp.up.bias", interleaved)[0][0] for n in range(4)] == [0, 1, 0, 1]
    assert of("norm.scale", interleaved) == [(0, (0,), (6,), 0), (1, (0,), (6,), 1)]


def test_a_device_with_padding_alone_has_an_empty_shard():
    small = Model(n_layer=1, n_head=1, n_embd=3, block_size=5, vocab_size=7, bias=True)
    found = of("norm.scale", Layout(dp_shard=4, zero=3), model=small)  # 3 over 4
    assert found == [(0, (0,), (1,), 0), (1, (1,), (1,), 0), (2, (2,), (1,), 0), (3, (3,), (0,), 0)]
