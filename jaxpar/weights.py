"""Conversion between canonical parameters and the state tree.

Canonical parameters have one array per layer, `blocks.3.mlp.up.weight` (C, M). The state tree, of weights,
gradients or moments, has nested dicts with stacked layers, `tree["blocks"]["mlp"]["up"]["weight"]` (L, C, M).
No array is transposed.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from compare.numerics.parameters import Parameter, decays, parameter_table, storage_dtype
from compare.spec.axes import LAYER
from compare.spec.experiment import Experiment, Model

STACKED = "blocks"


def from_canonical(named: Mapping[str, np.ndarray], model: Model) -> dict[str, Any]:
    """The state tree, as NumPy arrays with stacked layers (L, ...), from canonical arrays (...)."""
    paths = parameters_by_path(model)
    return unflatten_dict({path: stack_layers(named, path, parameters) for path, parameters in paths.items()})


def stack_layers(
    named: Mapping[str, np.ndarray], path: tuple[str, ...], parameters: list[Parameter]
) -> np.ndarray:
    """One leaf of the state tree, from its canonical parameters."""
    tensors = [named[parameter.name] for parameter in parameters]
    return np.stack(tensors) if path[0] == STACKED else tensors[0]


def to_canonical(tree: Mapping[str, Any], model: Model) -> dict[str, np.ndarray]:
    """Tensors (...) by canonical name, as NumPy arrays, from a tree like the state tree."""
    leaves = flatten_dict(dict(tree))
    named = {}
    for path, parameters in parameters_by_path(model).items():
        leaf = np.asarray(leaves[path])
        slices = leaf if path[0] == STACKED else leaf[None]
        named |= {parameter.name: tensor for parameter, tensor in zip(parameters, slices, strict=True)}
    return {parameter.name: named[parameter.name] for parameter in parameter_table(model)}


def logical_axes(model: Model) -> dict[str, Any]:
    """A tree with each leaf's logical axes, `LAYER` first where layers are stacked."""
    paths = parameters_by_path(model)
    return unflatten_dict(
        {path: ((LAYER,) if path[0] == STACKED else ()) + layers[0].axes for path, layers in paths.items()}
    )


def parameter_shapes(experiment: Experiment) -> dict[str, Any]:
    """A tree of each leaf's shape and dtype, blocks stacked."""
    dtype, shapes = storage_dtype(experiment), {}
    for path, layers in parameters_by_path(experiment.model).items():
        shape = (len(layers), *layers[0].shape) if path[0] == STACKED else layers[0].shape
        shapes[path] = jax.ShapeDtypeStruct(shape, dtype)
    return unflatten_dict(shapes)


def without_layers(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves outside the stacked blocks: embeddings and final norm."""
    return {key: tree[key] for key in tree if key != STACKED}


def decay_mask(model: Model, decay: str) -> dict[str, Any]:
    """A tree of bools, true for leaves that decay. Stacked scales of LayerNorm are 2-D and do not decay."""
    paths = parameters_by_path(model)  # layers agree
    return unflatten_dict({path: decays(parameters[0], decay) for path, parameters in paths.items()})


def parameters_by_path(model: Model) -> dict[tuple[str, ...], list[Parameter]]:
    """The canonical parameters behind each leaf, in the order of the layers."""
    paths: dict[tuple[str, ...], list[Parameter]] = {}
    for parameter in parameter_table(model):
        path = tuple(key for key in parameter.name.split(".") if not key.isdigit())
        paths.setdefault(path, []).append(parameter)
    return paths
