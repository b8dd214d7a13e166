"""jaxpar for a model of one's own: the docstring's MLP, and losses that go past what a layout edits."""

import doctest
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
import pytest
from flax import nnx

from compare.numerics.optimizer import step_scalars
from compare.spec.experiment import Layout, Optimizer, Precision
from jaxpar import compiler, explicit, manual
from jaxpar.comm.mesh import make_mesh
from jaxpar.model import Dtypes, Embedding, Linear, cross_entropy
from jaxpar.optimizer import make_optimizer, state_like
from jaxpar.problem import Pieces, Problem

ENGINES = {
    "jax-compiler": compiler.parallelize,
    "jax-explicit": explicit.parallelize,
    "jax-manual": manual.parallelize,
}
ZERO3, TP, BOTH = Layout(dp_shard=4, zero=3), Layout(tp=2), Layout(dp_shard=2, zero=3, tp=2)
L, C, M, V, T = 3, 4, 8, 7, 6
F64 = Dtypes(Precision(dtype="float64"))


def test_the_docstrings_example_runs():
    names = dict(jax=jax, jnp=jnp, np=np, nnx=nnx, msgspec=msgspec, Dtypes=Dtypes, Linear=Linear)
    names |= dict(Layout=Layout, Optimizer=Optimizer, Precision=Precision, step_scalars=step_scalars)
    names |= dict(make_mesh=make_mesh, make_optimizer=make_optimizer, state_like=state_like, Problem=Problem)
    (test,) = doctest.DocTestFinder(recurse=False).find(Problem, "Problem", globs=names)
    said: list[str] = []
    failed, tried = doctest.DocTestRunner().run(test, out=said.append)
    assert not failed, "".join(said)
    assert tried > 10


# A language model of the two modules that tp knows, and of whatever a test does wrong -----------------------


class Layer(nnx.Module):
    def __init__(self):
        self.up = Linear((C,), (M,), bias=True, dtypes=F64)
        self.down = Linear((M,), (C,), bias=True, dtypes=F64)
        self.scale = nnx.Param(jnp.zeros(C))

    def __call__(self, x):
        return x + self.scale[...] * self.down(jax.nn.gelu(self.up(x)))


class LM(nnx.Module):
    def __init__(self):
        self.wrap_layer = lambda layer: layer
        self.cross_entropy = cross_entropy
        self.embedding = Embedding(SimpleNamespace(vocab_size=V, n_embd=C, block_size=T), F64)
        self.blocks = nnx.vmap(Layer, axis_size=L)()

    def layers(self, x, wrap=None, some=slice(None)):
        graph, layers = nnx.split(self.blocks)
        layer = (wrap or self.wrap_layer)(lambda x, weights: (nnx.merge(graph, weights)(x), None))
        return jax.lax.scan(layer, x, jax.tree.map(lambda w: w[some], nnx.to_pure_dict(layers)))[0]

    def loss(self, tokens, targets):
        return self.cross_entropy(self.embedding.logits(self.layers(self.embedding(tokens))), targets)


AXES = {
    "embedding": {"token": ("vocab", "embed"), "position": ("position", "embed")},
    "blocks": {
        "up": {"weight": ("layer", "embed", "mlp"), "bias": ("layer", "mlp")},
        "down": {"weight": ("layer", "mlp", "embed"), "bias": ("layer", "embed")},
        "scale": ("layer", "embed"),
    },
}
SHAPES = nnx.to_pure_dict(nnx.state(nnx.eval_shape(LM)))


def build(edit, loss=lambda model, params, batch: model.loss(batch["x"], batch["y"]), make=LM):
    def edited():
        model = make()
        edit(model)
        return model

    graph, _ = nnx.split(nnx.eval_shape(edited))
    return lambda params, batch: loss(nnx.merge(graph, params), params, batch)


def step(parallelize, layout, build=build, axes=AXES, shapes=SHAPES):
    """One step from drawn weights: loss, gradients and new weights."""
    spec = Optimizer(warmup_iters=0)
    problem = Problem(build=build, shapes=shapes, axes=axes, remat="dots")
    optimizer = make_optimizer(spec, decay=jax.tree.map(lambda _: True, problem.shapes))
    sharded = parallelize(problem, optimizer, mesh=make_mesh(layout, platform="cpu"), layout=layout)
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: draw.standard_normal(leaf.shape), problem.shapes)
    batch = {name: draw.integers(0, V, (2, 8, T)) for name in ("x", "y")}
    params = jax.device_put(sharded.pad(params), sharded.params)
    state = jax.jit(optimizer.init, out_shardings=state_like(optimizer, params, sharded.moments))(params)
    run = jax.jit(sharded.step, compiler_options=sharded.compiler_options)
    scalars = msgspec.structs.asdict(step_scalars(spec, 0))
    params, _, metrics, gradients = run(params, state, jax.device_put(batch, sharded.batch), scalars)
    return float(metrics["loss"]), sharded.unpad(gradients), sharded.unpad(params)


@pytest.fixture(scope="module")
def one_device():
    return step(compiler.parallelize, Layout())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_of_ones_own_equals_one_device(engine, one_device):
    found = step(ENGINES[engine], Layout(dp_shard=2, zero=3, tp=2, sequence_parallel=True))
    errors = jax.tree.map(lambda a, b: np.abs(a - b).max() / np.abs(b).max(), found, one_device)
    assert max(jax.tree.leaves(errors)) <= 1e-10  # measured 1e-14


def past_the_layers(model, params, batch):
    x = model.layers(model.embedding(batch["x"]), wrap=lambda layer: layer)
    return model.cross_entropy(model.embedding.logits(x), batch["y"])


def past_some_layers(model, params, batch):
    x = model.layers(model.embedding(batch["x"]), some=slice(0, 1))
    x = model.layers(x, wrap=lambda layer: layer, some=slice(1, L))
    return model.cross_entropy(model.embedding.logits(x), batch["y"])


def with_a_penalty(model, params, batch):
    return model.loss(batch["x"], batch["y"]) + jnp.square(params["blocks"]["up"]["weight"]).sum()


def past_the_loss(model, params, batch):
    return cross_entropy(model.embedding.logits(model.layers(model.embedding(batch["x"]))), batch["y"])


def past_the_head(model, params, batch):
    logits = model.layers(model.embedding(batch["x"])) @ params["embedding"]["token"].T
    return model.cross_entropy(logits, batch["y"])


def build_unedited(edit):
    return build(lambda model: None)


WRONG = {
    "zero3, no edit": (
        ZERO3,
        build_unedited,
        "layout.zero = 3: the loss uses blocks.down.bias, blocks.down.we",
    ),
    "zero3, around wrap_layer": (ZERO3, past_the_layers, "ungathered: it must scan over model.wrap_layer"),
    "zero3, some layers": (
        ZERO3,
        past_some_layers,
        "blocks.down.bias, blocks.down.weight, blocks.scale and 2 mo",
    ),
    "zero3, a penalty": (ZERO3, with_a_penalty, "layout.zero = 3: the loss uses blocks.up.weight ungathered"),
    "tp, no edit": (
        TP,
        build_unedited,
        "layout.tp = 2: blocks.down.weight, blocks.up.bias, blocks.up.weight and",
    ),
    "tp, a penalty": (
        TP,
        with_a_penalty,
        "layout.tp = 2: blocks.up.weight would be split, and the loss uses it",
    ),
    "tp, another head": (
        TP,
        past_the_head,
        "layout.tp = 2: embedding.token would be split, and the loss uses i",
    ),
    "tp, another loss": (TP, past_the_loss, "layout.tp = 2: what embedding.logits gives is split"),
    "both, a penalty": (BOTH, with_a_penalty, "layout.zero = 3: the loss uses blocks.up.weight ungathered"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("layout", "loss", "says"), WRONG.values(), ids=WRONG)
def test_a_loss_that_goes_past_the_edits_is_refused(engine, layout, loss, says):
    built = loss if loss is build_unedited else partial(build, loss=loss)
    with pytest.raises(ValueError, match=r"jaxpar\.problem\.Problem") as refused:
        step(ENGINES[engine], layout, build=built)
    assert says in str(refused.value)


@pytest.mark.parametrize("engine", ENGINES)
def test_pieces_that_go_past_the_edits_are_refused(engine):
    def pieces(edit):
        def layers(params, x, batch, first):
            return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["blocks"])[0]

        return Pieces(
            embed=lambda params, batch: params["first"][batch["x"]].mean(axis=1),
            layers=layers,
            loss=lambda params, x, batch: jnp.square(x - batch["y"][:, :1]).mean(),
        )

    spec = Optimizer()
    problem = Problem(
        build=build_unedited,
        pieces=pieces,
        shapes={"first": np.ones((V, C)), "blocks": np.ones((2, C, C))},
        axes={"first": ("token", "embed"), "blocks": ("layer", "in", "out")},
        remat="none",
    )
    layout = Layout(pp=2, schedule="gpipe", dp_shard=2, zero=3, microbatches=2)
    optimizer = make_optimizer(spec, decay={"first": True, "blocks": True})
    sharded = ENGINES[engine](problem, optimizer, mesh=make_mesh(layout, platform="cpu"), layout=layout)
    batch = {name: np.ones((1, 8, T), np.int32) for name in ("x", "y")}
    state = jax.eval_shape(optimizer.init, problem.shapes)
    scalars = msgspec.structs.asdict(step_scalars(spec, 0))
    with pytest.raises(ValueError, match=r"layout\.zero = 3: the loss uses blocks ungathered"):
        jax.eval_shape(sharded.step, problem.shapes, state, batch, scalars)


def changed(key, name, axes):
    blocks = {**AXES["blocks"], key: {**AXES["blocks"][key], name: axes}}
    return {**AXES, "blocks": blocks}


BAD_AXES = {
    "too few": (ZERO3, changed("up", "bias", ("mlp",)), "blocks.up.bias: ('mlp',), and its shape is (3, 8)"),
    "a bias of its own": (
        TP,
        changed("up", "bias", ("layer", "embed")),
        "blocks.up.bias has the axes ('embed',)",
    ),
    "does not divide": (Layout(tp=3), AXES, "mlp = 8, which layout.tp = 3 does not divide"),
    "vocabularies": (
        TP,
        {**AXES, "embedding": dict.fromkeys(AXES["embedding"], ("vocab", "embed"))},
        "[6, 7]",
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("layout", "axes", "says"), BAD_AXES.values(), ids=BAD_AXES)
def test_axes_that_do_not_fit_are_one_line(engine, layout, axes, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        step(ENGINES[engine], layout, axes=axes)


def test_a_loss_of_ones_own_over_a_split_vocabulary_is_refused_and_not_replaced():
    class Smoothed(LM):
        def __init__(self):
            super().__init__()
            self.cross_entropy = lambda logits, targets: 0.9 * cross_entropy(logits, targets)

    with pytest.raises(ValueError, match=r"must be jaxpar\.model\.cross_entropy"):
        step(manual.parallelize, TP, build=partial(build, make=Smoothed))


@pytest.mark.parametrize("engine", ENGINES)
def test_without_stacked_layers_everything_is_gathered_up_front(engine):
    """Any object is a model, and any loss: there is nothing to edit."""
    shapes = {"first": jax.ShapeDtypeStruct((T, M), float), "last": jax.ShapeDtypeStruct((M,), float)}
    axes = {"first": ("in", "out"), "last": ("out",)}

    def build(edit):
        edit(SimpleNamespace())
        return lambda params, batch: jnp.tanh(batch["x"] @ params["first"] @ params["last"]).mean()

    found, expected = (step(ENGINES[engine], layout, build, axes, shapes) for layout in (ZERO3, Layout()))
    errors = jax.tree.map(lambda a, b: np.abs(a - b).max() / np.abs(b).max(), found, expected)
    assert max(jax.tree.leaves(errors)) <= 1e-10


def two_arrays(*, shapes=None) -> Problem:
    shape = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    shapes = shapes or {"first": shape, "last": shape}
    return Problem(
        build=lambda edit: lambda params, batch: jnp.float32(0),
        shapes=shapes,
        axes=jax.tree.map(lambda _: ("in", "out"), shapes),
        remat="none",
    )


OWN = make_optimizer(Optimizer(), decay={"first": True, "last": True})
OPTAX = {
    "adamw": optax.adamw(1e-3),
    "sgd": optax.sgd(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    "steps": optax.MultiSteps(optax.adam(1e-3), 2),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", OPTAX)
def test_an_optimizer_that_may_look_beyond_an_element_is_refused(engine, name):
    layout = Layout(dp_shard=2, zero=3)
    optimizer, mesh = optax.with_extra_args_support(OPTAX[name]), make_mesh(layout, platform="cpu")
    with pytest.raises(TypeError, match=r"optimizer's state ends in .*: give one that keeps a dict"):
        ENGINES[engine](two_arrays(), optimizer, mesh=mesh, layout=layout)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_engine_refuses_its_library_refuses_too(engine):
    layout = Layout(dp_replicate=2)
    mesh = make_mesh(layout, platform="cpu")
    other = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    parallelize = partial(ENGINES[engine], layout=layout)
    with pytest.raises(ValueError, match=r"the mesh has axes \{'data': 2\}, and the layout .*make_mesh"):
        parallelize(two_arrays(), OWN, mesh=other)
    shape = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    with pytest.raises(TypeError, match=r"Problem\.shapes: .* is no key of a dict: nest dicts"):
        parallelize(two_arrays(shapes=[shape, shape]), OWN, mesh=mesh)
    schedule = "1f1b" if engine == "jax-compiler" else "zero_bubble"
    pipeline = Layout(pp=2, microbatches=2, schedule=schedule)
    with pytest.raises(ValueError, match=re.escape(f"layout.schedule = {schedule}")):
        ENGINES[engine](two_arrays(), OWN, mesh=make_mesh(pipeline, platform="cpu"), layout=pipeline)


@pytest.mark.parametrize("cut", [compiler.pipeline_parallel.one_pass, manual.pipeline_parallel.microbatches])
def test_microbatches_that_do_not_divide_are_named(cut):
    argument = {"each" if cut is manual.pipeline_parallel.microbatches else "microbatches": 3}
    with pytest.raises(ValueError, match=r"layout\.microbatches = 3 does not divide 4 rows"):
        cut({"x": jnp.zeros((1, 4, 2))}, **argument)
