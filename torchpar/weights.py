"""Canonical names, shapes and axes as nanoGPT's, and arrays into a model and out of it.

A canonical matrix is (in, out), qkv (C, 3, H, D) and out (H, D, C); torch.nn.Linear has (out, in). A gradient
or a moment has the shape of its weight, so one mapping serves all three.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch

from compare.formats.gpt2_names import TRANSFORMER, gpt2_name, input_dims
from compare.numerics.boxes import Weights, from_boxes
from compare.numerics.optimizer import moment_names
from compare.numerics.parameters import Parameter, parameter_table
from compare.numerics.shards import Shard
from compare.spec.experiment import Experiment, Model, Optimizer
from torchpar.model import GPT

_TORCH_MOMENTS = {"adamw": {"m": "exp_avg", "v": "exp_avg_sq"}, "sgd": {"m": "momentum_buffer"}}


def nanogpt_name(name: str) -> str:
    """nanoGPT's name of the parameter with this canonical name."""
    return TRANSFORMER + gpt2_name(name)


def to_nanogpt(parameter: Parameter, array: np.ndarray) -> np.ndarray:
    """A canonical array in nanoGPT's shape. A Linear's weight becomes (out, in)."""
    if inputs := input_dims(parameter):
        return array.reshape(math.prod(parameter.shape[:inputs]), -1).T
    return array.reshape(-1) if parameter.name.endswith(".bias") else array


def to_array(parameter: Parameter, tensor: torch.Tensor) -> np.ndarray:
    """A copy of a full tensor of nanoGPT's shape, in the canonical shape."""
    array = tensor.detach().to("cpu", copy=True).numpy()
    return np.ascontiguousarray((array.T if input_dims(parameter) else array).reshape(parameter.shape))


def to_arrays(tensors: Mapping[str, torch.Tensor], config: Model) -> dict[str, np.ndarray]:
    """Copies of full weights, gradients or moments: nanoGPT's names to canonical names and shapes."""
    return {row.name: to_array(row, tensors[nanogpt_name(row.name)]) for row in parameter_table(config)}


def empty_model(experiment: Experiment, device: torch.device) -> GPT:
    """The whole model on the meta device: shapes and dtypes without memory. RoPE's table is on `device`."""
    dtype = torch.float64 if experiment.precision.dtype == "float64" else torch.float32
    with torch.device("meta"):
        model = GPT(experiment.model, loss_chunks=experiment.train.loss_chunks).to(dtype=dtype)
    if model.turns is not None:  # copied once: a copy in each forward would wait for a GPU
        model.turns = model.turns.to(device, dtype)
    return model


@torch.no_grad()
def load_weights(model: GPT, weights: Mapping[str, np.ndarray]) -> None:
    """Copy canonical weights (canonical name -> canonical shape) into the model."""
    for row in parameter_table(model.config):
        parameter = model.get_parameter(nanogpt_name(row.name))
        array = np.ascontiguousarray(to_nanogpt(row, weights[row.name]))
        assert array.shape == parameter.shape, f"{row.name}: {array.shape} into {tuple(parameter.shape)}"
        parameter.copy_(torch.from_numpy(array))


@torch.no_grad()
def write_shard(tensor: torch.Tensor, shard: Shard, weights: Weights) -> None:
    """Write a shard of the weights into a tensor of any shape. Padding becomes zero."""
    dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
    array = from_boxes(shard, lambda boxes: weights.boxes(shard.name, boxes), dtype)
    if shard.elements is None and shard.dim_order:
        array = array.transpose(shard.dim_order)
    values = torch.from_numpy(np.ascontiguousarray(array).reshape(-1))
    if padding := tensor.numel() - len(values):
        values = torch.cat([values, values.new_zeros(padding)])
    tensor.copy_(values.view(tensor.shape))


def moment_keys(config: Optimizer) -> dict[str, str]:
    """torch.optim's name of each moment that this optimizer has: of m and v, of m, or none."""
    return {name: _TORCH_MOMENTS[config.name][name] for name in moment_names(config)}


def nanogpt_dims(parameter: Parameter) -> tuple[int, ...]:
    """The canonical dims in the order of nanoGPT's tensor: a Linear's outputs, then its inputs."""
    dims, inputs = tuple(range(len(parameter.shape))), input_dims(parameter)
    return (*dims[inputs:], *dims[:inputs])


def nanogpt_dim(parameter: Parameter, dim: int) -> int:
    """The dim of nanoGPT's tensor that a canonical dim is part of."""
    if inputs := input_dims(parameter):
        return int(dim < inputs)
    return dim if parameter.is_matrix else 0
