"""GPT-2's names of the canonical parameters: nanoGPT's and Hugging Face's, which differ in a prefix alone."""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from compare.numerics.initial_weights import require_fit
from compare.numerics.parameters import Parameter, parameter_table
from compare.spec.experiment import ExperimentError, Model

_TOP = {
    "embedding.token": "wte.weight",
    "embedding.position": "wpe.weight",
    "norm.scale": "ln_f.weight",
    "norm.bias": "ln_f.bias",
}
_IN_BLOCK = {
    "norm1.scale": "ln_1.weight",
    "norm1.bias": "ln_1.bias",
    "attention.qkv.weight": "attn.c_attn.weight",
    "attention.qkv.bias": "attn.c_attn.bias",
    "attention.out.weight": "attn.c_proj.weight",
    "attention.out.bias": "attn.c_proj.bias",
    "norm2.scale": "ln_2.weight",
    "norm2.bias": "ln_2.bias",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.up.weight": "mlp.c_fc.weight",
    "mlp.up.bias": "mlp.c_fc.bias",
    "mlp.down.weight": "mlp.c_proj.weight",
    "mlp.down.bias": "mlp.c_proj.bias",
}
TRANSFORMER = "transformer."
"""The prefix that a model with a head puts before each."""
WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "model"}
"""Parts of names: of DistributedDataParallel, torch.compile, checkpoint_wrapper, FSDP and Lightning."""
HEAD = "lm_head.weight"
MASKS = (".attn.bias", ".attn.masked_bias")
"""Ends of causal masks' names, which old files have."""


def gpt2_name(name: str) -> str:
    """The name of the parameter with this canonical name, without the prefix: `h.3.mlp.c_fc.weight`."""
    if name in _TOP:
        return _TOP[name]
    _, layer, rest = name.split(".", 2)
    return f"h.{layer}.{_IN_BLOCK[rest]}"


def has_gpt2_names(names: Iterable[str]) -> bool:
    """True for the names of a GPT-2, with any prefix."""
    return any(name.endswith((_TOP["embedding.token"], HEAD)) for name in names)


def _plain(name: str) -> str:
    """A name without the parts that wrappers add anywhere, and without `TRANSFORMER`."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS).removeprefix(TRANSFORMER)


def input_dims(parameter: Parameter) -> int:
    """The number of leading dims of a matrix product that are its inputs; 0 for other parameters.

    qkv, up and the router read the embedding, their first axis; out and down write it, their last. Experts
    are a stack of matrices and keep the canonical shape.
    """
    if not parameter.is_matrix or parameter.name.startswith("embedding.") or "expert" in parameter.axes:
        return 0
    return 1 if parameter.axes[0] == "embed" else len(parameter.shape) - 1


def require_gpt2(model: Model, origin: str) -> None:
    """Reject a model that GPT-2 cannot express. Raises ExperimentError, which names the option."""
    has = {
        "activation": model.activation == "relu_squared",
        "norm": model.norm == "rmsnorm",
        "position": model.position == "rope",
        "n_kv_head": model.group > 1,
        "n_experts": model.n_experts > 0,
    }
    for key in filter(has.get, has):
        raise ExperimentError(f"{origin}: model.{key} = {getattr(model, key)}: GPT-2 has no such option")


def gpt2_shape(parameter: Parameter, *, is_linear: bool = False) -> tuple[int, ...]:
    """Inputs and outputs of a matrix as one dim each, the outputs first in nn.Linear."""
    if not (inputs := input_dims(parameter)):
        return parameter.shape if parameter.is_matrix else (math.prod(parameter.shape),)
    shape = math.prod(parameter.shape[:inputs]), math.prod(parameter.shape[inputs:])
    return shape[::-1] if is_linear else shape


def from_gpt2(
    tensors: Mapping[str, np.ndarray], model: Model, origin: str, *, is_linear: bool = False
) -> dict[str, np.ndarray]:
    """Weights by canonical name, from tensors with GPT-2's names, without wrappers' parts and the tied head.

    Matrices are (in, out) as in Hugging Face's Conv1D, or (out, in) as in nn.Linear. Raises ExperimentError:
    the tensors do not fit the model, or GPT-2 cannot express the model.
    """
    require_gpt2(model, origin)
    arrays: dict[str, np.ndarray] = {}
    for name in tensors:
        plain = _plain(name)
        if plain in arrays:
            raise ExperimentError(f"{origin} has {plain} twice, with and without a prefix: remove {name}")
        if not plain.endswith(MASKS):
            arrays[plain] = tensors[name]
    token = _TOP["embedding.token"]
    if prefixed := next((name for name in arrays if name.endswith(f".{token}")), ""):
        prefix = prefixed.removesuffix(token)
        raise ExperimentError(f"{origin}: unknown prefix {prefix} of {prefixed}: remove it from all names")
    rows = {gpt2_name(row.name): row for row in parameter_table(model)}
    head = arrays.pop(HEAD, None)
    if head is not None and not np.array_equal(head, arrays.setdefault(gpt2_name("embedding.token"), head)):
        raise ExperimentError(f"{origin}: {HEAD} is not tied to the embedding, and the model's is")
    shapes = {name: np.shape(array) for name, array in arrays.items()}
    if is_linear and shapes.get("h.0.attn.c_attn.weight") == (model.n_embd, 3 * model.n_embd):
        raise ExperimentError(f"{origin} is Hugging Face's: give its folder, which contains config.json")
    require_fit(shapes, {name: gpt2_shape(row, is_linear=is_linear) for name, row in rows.items()}, origin)
    if is_linear:
        arrays |= {name: arrays[name].T for name, row in rows.items() if input_dims(row)}
    return {row.name: arrays[name].reshape(row.shape) for name, row in rows.items()}
