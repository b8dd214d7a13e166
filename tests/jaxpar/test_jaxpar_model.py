"""jaxpar's model: against NumPy, which is causal, and its dtypes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from compare.numerics.parameters import initial_parameters
from compare.spec.experiment import Experiment, Layout, Model, Precision
from jaxpar import weights
from jaxpar.functional import cross_entropy
from jaxpar.hooks import Hooks
from jaxpar.model import loss_function
from tests.support.numpy_gpt import numpy_loss

F64 = Precision(dtype="float64")
SPEC = Model(n_layer=2, n_head=2, n_embd=8, block_size=6, vocab_size=11, bias=True)


def random_parameters(config: Model, dtype: str = "float64") -> dict[str, np.ndarray]:
    """Canonical parameters of size about 0.3, so that nothing is near zero or one."""
    experiment = Experiment(model=config, precision=Precision(dtype=dtype))
    generator = np.random.default_rng(0)
    initial = initial_parameters(experiment)
    return {n: w + generator.normal(0, 0.3, w.shape).astype(w.dtype) for n, w in initial.items()}


def experiment_of(config: Model, precision: Precision = F64) -> Experiment:
    return Experiment(model=config, precision=precision, layout=Layout(remat="dots"))


def loss_of(experiment: Experiment, hooks: Hooks | None = None) -> Callable[..., jax.Array]:
    return lambda params, batch: loss_function(experiment, hooks or Hooks())(params, batch)[0]


def random_batch(config: Model, size: int = 3) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, size, config.block_size))
    return {"inputs": tokens[0], "targets": tokens[1]}


OPTIONS = {
    "gelu": {},
    "no_bias": {"bias": False},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "relu_squared": {"activation": "relu_squared"},
    "rmsnorm": {"norm": "rmsnorm"},
    "n_kv_head": {"n_head": 4, "n_kv_head": 2},
    "rope": {"position": "rope", "rope_base": 7.0},
    "experts": {"n_experts": 4, "balance": 0.3},
    "three_experts": {"n_experts": 5, "experts_per_token": 3, "bias": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_loss_equals_numpy(options):
    config = replace(SPEC, **options)
    named, batch = random_parameters(config), random_batch(config)
    loss = loss_of(experiment_of(config))(weights.from_canonical(named, config), batch)
    # Measured 2e-16 to 9e-16; gelu against gelu_tanh differs by 1e-4 and eps 1e-6 by 1e-6.
    assert abs(loss - numpy_loss(config, named, **batch)) < 1e-13


def test_hook_of_attention():
    """A hook that multiplies queries is the same as larger query weights."""
    named, batch = random_parameters(SPEC), random_batch(SPEC)
    hooks = Hooks(attention=lambda attention, q_BTHD, *kv, factor: attention(1.5 * q_BTHD, *kv))
    hooked = loss_of(experiment_of(SPEC), hooks)(weights.from_canonical(named, SPEC), batch)
    for name in [name for name in named if ".qkv." in name]:
        named[name][..., 0, :, :] *= 1.5
    assert hooked == pytest.approx(numpy_loss(SPEC, named, **batch), rel=1e-13)


def test_hook_of_positions():
    """Every second row of the table, as on a device that has some of the positions."""
    params = weights.from_canonical(random_parameters(SPEC), SPEC)
    batch = {name: tokens[:, :3] for name, tokens in random_batch(SPEC).items()}
    loss = loss_of(experiment_of(SPEC))
    hooks = Hooks(position_vectors=lambda table, x: table[jnp.array([0, 2, 4])])
    of_some = loss_of(experiment_of(SPEC), hooks)
    table = params["embedding"]["position"]
    moved = params | {"embedding": params["embedding"] | {"position": table[[0, 2, 4, 1, 3, 5]]}}
    assert of_some(params, batch) == loss(moved, batch) != loss(params, batch)


def test_bfloat16_is_mixed_precision():
    named, batch = random_parameters(SPEC, "float32"), random_batch(SPEC)
    params = jax.tree.map(jnp.asarray, weights.from_canonical(named, SPEC))
    mixed = experiment_of(SPEC, Precision(dtype="bfloat16"))
    value, gradients = jax.jit(jax.value_and_grad(loss_of(mixed)))(params, batch)
    assert value.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    full = loss_of(experiment_of(SPEC, Precision(dtype="float32")))
    difference = abs(float(full(params, batch)) - float(value))
    assert 0 < difference < 2e-2  # bfloat16 has 8 bits: it must show, and no more than that
    uniform = cross_entropy(jnp.zeros((1, 2, 7), jnp.bfloat16), jnp.zeros((1, 2), int))
    assert uniform.dtype == jnp.float32
    assert abs(uniform - np.log(7)) < 1e-6


def test_float64_is_float64_throughout():
    """One float32 operation anywhere (a library's softmax was one) would round by 1e-8."""
    model = replace(SPEC, n_experts=3)
    loss = loss_of(experiment_of(model))
    params = weights.from_canonical(random_parameters(model), model)
    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(params, random_batch(SPEC)))
    assert "f64[" in jaxpr
    assert "f32[" not in jaxpr


def test_equal_logits_choose_first_experts():
    """With a router of zeros all are equal: each token has experts 0 and 1, half of each."""
    model = replace(SPEC, n_experts=4, bias=False)
    named, batch = random_parameters(model), random_batch(model)
    named |= {name: np.zeros_like(w) for name, w in named.items() if "router" in name}
    loss, routing = loss_function(experiment_of(model), Hooks())(weights.from_canonical(named, model), batch)
    assert (routing.expert_ids == np.array([0, 1])).all()
    assert routing.tokens_per_expert.tolist() == [[18, 18, 0, 0]] * model.n_layer
    assert abs(loss - numpy_loss(model, named, **batch)) < 1e-13
