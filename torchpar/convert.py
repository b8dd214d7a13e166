"""`python -m torchpar --convert SOURCE TARGET`: nanoGPT's weights as safetensors with canonical names.

Nothing is executed: a checkpoint is unpickled by torch.load(weights_only=True).
"""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from compare.host.disk import why_not_readable
from compare.numerics.initial_weights import require_fit, write_weights
from compare.spec.experiment import ExperimentError, Model
from torchpar.weights import COMPILED_PREFIX, nanogpt_shapes, to_arrays

EMBEDDING, HEAD = "transformer.wte.weight", "lm_head.weight"
SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")


def convert(source: Path, target: Path, model: Model | None = None) -> None:
    """Write nanoGPT's weights as safetensors with canonical names. Raises ExperimentError.

    They are in its ckpt.pt, a state dict saved by torch.save, or safetensors with nanoGPT's names. The sizes
    are by default those in the checkpoint (`model_args`).
    """
    loaded = read(source)
    state = loaded.get("model", loaded) if isinstance(loaded, Mapping) else None
    sizes = loaded.get("model_args") or {} if state is not None and state is not loaded else {}
    known = {key: sizes[key] for key in SIZES if key in sizes}
    if model is None:
        if len(known) < len(SIZES):
            raise ExperimentError(f"init_from: {source} does not say its sizes: give them with --base JSON")
        model = msgspec.convert(known, Model)
    for key, value in known.items():  # shapes do not show the number of heads
        if value != getattr(model, key):
            raise ExperimentError(
                f"init_from: {source} has {key} = {value} and the model {getattr(model, key)}: "
                f"set --model.* as these weights need"
            )
    write_weights(target, to_arrays(plain_state(state, model, origin=f"init_from: {source}"), model))


def plain_state(state: Any, model: Model, *, origin: str) -> dict[str, torch.Tensor]:
    """Tensors of nanoGPT's state dict, in its shapes, by the plain model's names; the tied head once."""
    if not isinstance(state, Mapping):
        raise ExperimentError(f"{origin} holds no state dict: give nanoGPT's ckpt.pt")
    for name, tensor in state.items():
        if not isinstance(name, str) or not is_plain(tensor):
            raise ExperimentError(f"{origin}: {name} among its weights is no tensor of plain numbers")
    tensors = {name.removeprefix(COMPILED_PREFIX): tensor for name, tensor in state.items()}
    for layer in range(model.n_layer):  # the causal mask, before flash attention
        tensors.pop(f"transformer.h.{layer}.attn.bias", None)
    head = tensors.pop(HEAD, None)
    if head is not None and not torch.equal(head, tensors.setdefault(EMBEDDING, head)):
        raise ExperimentError(f"{origin}: {HEAD} is not tied to {EMBEDDING}, and the model's is")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    require_fit(shapes, nanogpt_shapes(model), origin)
    return {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in tensors.items()}


def is_plain(value: Any) -> bool:
    """Whether it is a dense floating-point tensor, of any shape, in the host's memory."""
    is_dense = torch.is_tensor(value) and value.layout == torch.strided
    return is_dense and value.is_floating_point() and value.device.type == "cpu"


def read(source: Path) -> Any:
    """Content of a safetensors file, or of one of torch.save with tensors and plain values alone."""
    if why := why_not_readable(source):
        raise ExperimentError(f"{source} {why}")
    try:
        if source.suffix == ".safetensors":
            return load_file(source)
        return torch.load(source, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError:
        why = "it holds more than tensors and plain values, or is no checkpoint; save its state dict alone"
        raise ExperimentError(f"{source} cannot be unpickled safely: {why}") from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, SafetensorError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise ExperimentError(f"{source} cannot be read: {why}") from None
