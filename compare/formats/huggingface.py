"""Hugging Face's GPT-2 as safetensors: names and shapes, to the canonical ones and back.

Hugging Face's Conv1D stores (in, out), as the canonical table does. nanoGPT's nn.Linear stores (out, in). The
format contains weights and no optimizer state.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import save

from compare.formats.gpt2_names import TRANSFORMER, from_gpt2, gpt2_name, gpt2_shape
from compare.numerics.parameters import parameter_table
from compare.spec.experiment import ExperimentError, Model
from compare.system.disk import write_atomically
from compare.system.tensors import RecordError, Tensors, garbled

CONFIG, WEIGHTS_FILE = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS_FILE}.index.json"
"""The file of each tensor, where transformers has written several files."""
DROPOUTS: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)
"""Hugging Face's three rates, where the model here has one, and their default."""
END_OF_TEXT = 50256
"""GPT-2's token, which Hugging Face takes for a model that names none."""
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
FIELDS = {
    "n_layer": ("n_layer", 12),
    "n_head": ("n_head", 12),
    "n_embd": ("n_embd", 768),
    "block_size": ("n_positions", 1024),
    "vocab_size": ("vocab_size", 50257),
    "norm_eps": ("layer_norm_epsilon", 1e-5),
    "dropout": ("resid_pdrop", 0.1),
}
"""The model's fields: their names in config.json, and Hugging Face's defaults."""
SUPPORTED: dict[str, tuple[object, ...]] = {
    "model_type": ("gpt2",),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "activation_function": tuple(ACTIVATIONS),
}
"""Values that the model here has; the first is Hugging Face's default."""


def is_huggingface(source: Path) -> bool:
    """True for a folder with a config.json and weights, in one file or several."""
    has_weights = (source / WEIGHTS_FILE).is_file() or (source / INDEX).is_file()
    return has_weights and (source / CONFIG).is_file()


def read_gpt2(folder: Path) -> tuple[Model, dict[str, np.ndarray]]:
    """The sizes, and the weights by canonical name. Raises ExperimentError, RecordError."""
    model = read_model(folder)
    single = folder / WEIGHTS_FILE
    return model, from_gpt2(Tensors(single) if single.is_file() else _indexed(folder), model, str(folder))


def _indexed(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of several files, by the folder's index. Raises RecordError: it names a file elsewhere."""
    path = folder / INDEX
    try:
        file_of = msgspec.json.decode(path.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise garbled(path, error) from None
    if elsewhere := [name for name in file_of.values() if Path(name).name != name]:
        raise RecordError(f"{path}: {elsewhere[0]} is not the name of a file in this folder: correct it")
    files = {name: Tensors(folder / name) for name in sorted(set(file_of.values()))}
    if missing := [name for name, file in file_of.items() if name not in files[file]]:
        raise RecordError(f"{folder / file_of[missing[0]]} lacks {missing[0]} of {INDEX}: copy it again")
    return {name: files[file][name] for name, file in file_of.items()}


class _Index(msgspec.Struct):
    """The part of `INDEX` that is read."""

    weight_map: dict[str, str]


def write_gpt2(folder: Path, model: Model, weights: Mapping[str, np.ndarray]) -> None:
    """Write config.json and model.safetensors, which `GPT2LMHeadModel.from_pretrained` reads.

    Biases that the model lacks are written as zeros. The model passes `require_gpt2`.
    """
    rows = parameter_table(msgspec.structs.replace(model, bias=True))
    dtype, tensors = weights["embedding.token"].dtype, {}
    for row in rows:
        weight = weights[row.name] if row.name in weights else np.zeros(row.shape)
        array = np.ascontiguousarray(weight.reshape(gpt2_shape(row)), dtype)
        tensors[TRANSFORMER + gpt2_name(row.name)] = array
    end = END_OF_TEXT if model.vocab_size > END_OF_TEXT else None
    config = {
        **{theirs: getattr(model, name) for name, (theirs, _) in FIELDS.items()},
        **{field: values[0] for field, values in SUPPORTED.items()},
        "architectures": ["GPT2LMHeadModel"],
        "torch_dtype": str(dtype),
        "n_ctx": model.block_size,
        "activation_function": "gelu" if model.activation == "gelu" else "gelu_new",
        **dict.fromkeys(DROPOUTS, model.dropout),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), end),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / WEIGHTS_FILE, save(tensors, {"format": "pt"}))
    write_atomically(folder / CONFIG, json.dumps(config, indent=2).encode() + b"\n")


def read_model(folder: Path) -> Model:
    """The sizes in a folder's config.json. Raises ExperimentError: GPT-2 here has no such option."""
    path = folder / CONFIG
    try:
        config = DROPOUTS | msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        sizes = {name: config.get(theirs, default) for name, (theirs, default) in FIELDS.items()}
        of_sizes = dict.fromkeys(DROPOUTS, (sizes["dropout"],)) | {"n_inner": (None, 4 * sizes["n_embd"])}
        for field, values in {**SUPPORTED, **of_sizes}.items():
            if (value := config.get(field, values[0])) not in values:
                said = " or ".join(map(json.dumps, values))
                raise ExperimentError(f"{path}: {field} = {json.dumps(value)}; possible: {said}")
        activation = ACTIVATIONS[config.get("activation_function", "gelu_new")]
        return msgspec.convert({**sizes, "bias": True, "activation": activation}, Model)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ExperimentError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
