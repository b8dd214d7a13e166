"""jaxpar's one mapping between canonical parameters and the model's state tree."""

import jax
import numpy as np
import pytest

from compare.contract.request import Request
from compare.numerics.parameters import fingerprint, initial_parameters, parameter_table
from compare.spec.experiment import Experiment, Layout, Model, Precision
from jaxpar import train, weights
from jaxpar.faults import plant
from jaxpar.problem import Problem

# More than ten layers: sorted as text, blocks.10 would come before blocks.2.
SPEC = Model(n_layer=11, n_head=2, n_embd=8, block_size=6, vocab_size=11)
BIASED = Model(n_layer=2, n_head=2, n_embd=8, block_size=6, vocab_size=11, bias=True)


@pytest.mark.parametrize("spec", [SPEC, BIASED])
def test_round_trip(spec):
    named = initial_parameters(Experiment(model=spec))
    back = weights.to_canonical(weights.from_canonical(named, spec), spec)
    assert list(back) == [parameter.name for parameter in parameter_table(spec)]
    for name, weight in named.items():
        assert back[name].dtype == weight.dtype
        np.testing.assert_array_equal(back[name], weight)


def test_layers_keep_their_order():
    named = initial_parameters(Experiment(model=SPEC))
    stacked = weights.from_canonical(named, SPEC)["blocks"]["mlp"]["up"]["weight"]
    for layer in range(SPEC.n_layer):
        np.testing.assert_array_equal(stacked[layer], named[f"blocks.{layer}.mlp.up.weight"])


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("spec", [SPEC, BIASED])
def test_tree_is_the_models_own(spec, dtype):
    experiment = Experiment(model=spec, precision=Precision(dtype=dtype))
    tree, abstract = weights.from_canonical(initial_parameters(experiment), spec), Problem(experiment).shapes
    assert jax.tree.structure(tree) == jax.tree.structure(abstract)
    for leaf, expected in zip(jax.tree.leaves(tree), jax.tree.leaves(abstract), strict=True):
        assert (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype)


def test_decay_follows_the_table_not_the_number_of_dims():
    mask = weights.decay_mask(BIASED, "matrices")
    tree = weights.from_canonical(initial_parameters(Experiment(model=BIASED)), BIASED)
    assert tree["blocks"]["norm1"]["scale"].ndim == 2
    assert not mask["blocks"]["norm1"]["scale"]
    assert not mask["blocks"]["attention"]["qkv"]["bias"]
    assert mask["blocks"]["attention"]["qkv"]["weight"]
    assert mask["embedding"]["position"]
    assert all(jax.tree.leaves(weights.decay_mask(BIASED, "all")))


def test_missing_leaf_is_an_error():
    tree = weights.from_canonical(initial_parameters(Experiment(model=BIASED)), BIASED)
    del tree["blocks"]["mlp"]["up"]["bias"]
    with pytest.raises(KeyError):
        weights.to_canonical(tree, BIASED)


def test_moved_weight_is_planted_in_one_weight():
    experiment = Experiment(model=BIASED, precision=Precision(dtype="float64"))
    request = Request(engine="jax-compiler", experiment=experiment)
    with plant("moved_weight", engine="jax-compiler", layout=Layout()):
        moved = train.starting_parameters(request)
    changes = {name: moved[name] - weight for name, weight in initial_parameters(experiment).items()}
    (change,) = [change for change in changes.values() if change.any()]
    assert change[change != 0] == pytest.approx([1e-3])
    assert fingerprint(train.starting_parameters(request)) != fingerprint(moved)  # and it is gone
