"""jaxpar's one mapping between canonical parameters and the model's state tree."""

from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx

from compare.numerics.parameters import initial_parameters, parameter_table
from compare.spec.experiment import Experiment, Model, Precision
from jaxpar import weights
from jaxpar.hooks import Hooks
from jaxpar.model import GPT

# More than ten layers: sorted as text, blocks.10 would come before blocks.2.
DEEP = Model(n_layer=11, n_head=2, n_embd=8, block_size=6, vocab_size=11)
BIASED = Model(n_layer=2, n_head=2, n_embd=8, block_size=6, vocab_size=11, bias=True)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("model", [DEEP, BIASED], ids=["deep", "biased"])
def test_tree_converts_to_layers_in_order(model, dtype):
    experiment = Experiment(model=model, precision=Precision(dtype=dtype))
    named = initial_parameters(experiment)
    shapes = nnx.to_pure_dict(nnx.state(nnx.eval_shape(partial(GPT, experiment, Hooks()))))
    tree = weights.from_canonical(named, model)
    assert jax.tree.structure(tree) == jax.tree.structure(shapes)
    assert shapes == weights.parameter_shapes(experiment)
    for leaf, expected in zip(jax.tree.leaves(tree), jax.tree.leaves(shapes), strict=True):
        assert (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype)
    for layer, weight in enumerate(tree["blocks"]["mlp"]["up"]["weight"]):
        np.testing.assert_array_equal(weight, named[f"blocks.{layer}.mlp.up.weight"])
    back = weights.to_canonical(tree, model)
    assert list(back) == [parameter.name for parameter in parameter_table(model)]
    for name, weight in named.items():
        np.testing.assert_array_equal(back[name], weight)


def test_missing_bias_is_an_error():
    tree = weights.from_canonical(initial_parameters(Experiment(model=BIASED)), BIASED)
    del tree["blocks"]["mlp"]["up"]["bias"]
    with pytest.raises(KeyError):
        weights.to_canonical(tree, BIASED)
