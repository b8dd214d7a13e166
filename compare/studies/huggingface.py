"""Hugging Face's GPT-2 as safetensors: names and shapes, to the canonical ones and back.

Its Conv1D keeps (in, out), as the canonical table does, and nn.Linear, which nanoGPT has, does not. Weights
alone: Hugging Face keeps no optimizer's state beside them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from safetensors.numpy import save

from compare.host.disk import write_atomically
from compare.host.tensors import Tensors
from compare.numerics.gpt2_names import TRANSFORMER, gpt2_name
from compare.numerics.initial_weights import require_fit
from compare.numerics.parameters import Parameter, parameter_table
from compare.spec.experiment import ExperimentError, Model

CONFIG, WEIGHTS_FILE = "config.json", "model.safetensors"
HEAD = "lm_head.weight"
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


class Config(Struct, frozen=True, kw_only=True):
    """What of its config.json says which model it is."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_positions: int = 1024
    vocab_size: int = 50257
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False
    model_type: str = "gpt2"


def is_huggingface(source: Path) -> bool:
    """True for a folder with a config.json of a GPT-2."""
    return (source / CONFIG).is_file() and (source / WEIGHTS_FILE).is_file()


def read_gpt2(folder: Path) -> tuple[Model, dict[str, np.ndarray]]:
    """The sizes, and the weights by canonical name.

    Raises:
        ExperimentError: it is no GPT-2, or one that this model cannot be.
        RecordError: the tensors cannot be read.
    """
    model = _model(folder / CONFIG)
    tensors = Tensors(folder / WEIGHTS_FILE)
    named = {name.removeprefix(TRANSFORMER): name for name in tensors if not _is_mask(name)}
    rows = parameter_table(model)
    if HEAD in named and not np.array_equal(
        tensors[named.pop(HEAD)], tensors[named[gpt2_name("embedding.token")]]
    ):
        raise ExperimentError(f"{folder}: {HEAD} is not tied to the embedding, and the model's is")
    require_fit(
        {name: tensors.shape(whole) for name, whole in named.items()},
        {gpt2_name(row.name): _shape(row) for row in rows},
        str(folder),
    )
    return model, {row.name: tensors[named[gpt2_name(row.name)]].reshape(row.shape) for row in rows}


def write_gpt2(folder: Path, model: Model, weights: Mapping[str, np.ndarray]) -> None:
    """Write config.json and model.safetensors, which `GPT2LMHeadModel.from_pretrained` reads.

    Biases that the model has not are zeros there.
    """
    rows = parameter_table(msgspec.structs.replace(model, bias=True))
    tensors = {}
    for row in rows:
        weight = weights[row.name] if row.name in weights else np.zeros(row.shape)
        array = np.ascontiguousarray(weight.reshape(_shape(row)), np.float32)
        tensors[TRANSFORMER + gpt2_name(row.name)] = array
    config: dict[str, Any] = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": model.n_layer,
        "n_head": model.n_head,
        "n_embd": model.n_embd,
        "n_positions": model.block_size,
        "n_ctx": model.block_size,
        "vocab_size": model.vocab_size,
        "activation_function": "gelu" if model.activation == "gelu" else "gelu_new",
        "layer_norm_epsilon": model.norm_eps,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout),
        "tie_word_embeddings": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / WEIGHTS_FILE, save(tensors, {"format": "pt"}))
    write_atomically(folder / CONFIG, json.dumps(config, indent=2).encode() + b"\n")


def _model(path: Path) -> Model:
    try:
        config = msgspec.json.decode(path.read_bytes(), type=Config)
    except (OSError, msgspec.DecodeError) as error:
        raise ExperimentError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    able: dict[str, tuple[object, ...]] = {
        "model_type": ("gpt2",),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
        "activation_function": tuple(ACTIVATIONS),
        "n_inner": (None, 4 * config.n_embd),
    }
    for field, values in able.items():
        if (value := getattr(config, field)) not in values:
            said = " or ".join(map(json.dumps, values))
            raise ExperimentError(f"{path}: {field} = {json.dumps(value)}: the model here has {said}")
    try:
        return msgspec.convert(
            {
                "n_layer": config.n_layer,
                "n_head": config.n_head,
                "n_embd": config.n_embd,
                "block_size": config.n_positions,
                "vocab_size": config.vocab_size,
                "bias": True,
                "activation": ACTIVATIONS[config.activation_function],
                "norm_eps": config.layer_norm_epsilon,
            },
            Model,
        )
    except msgspec.ValidationError as error:
        raise ExperimentError(f"{path}: {' '.join(str(error).split())}") from None


def _shape(row: Parameter) -> tuple[int, ...]:
    """Inputs and outputs as one dim each."""
    if row.name.startswith("embedding.") or len(row.shape) == 1:
        return row.shape
    if not row.is_matrix:
        return (int(np.prod(row.shape)),)
    inputs = 1 if row.axes[0] == "embed" else len(row.shape) - 1
    return int(np.prod(row.shape[:inputs])), int(np.prod(row.shape[inputs:]))


def _is_mask(name: str) -> bool:
    """The causal mask of each block, which old files have."""
    return name.endswith((".attn.bias", ".attn.masked_bias"))
