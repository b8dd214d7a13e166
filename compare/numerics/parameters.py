"""The canonical parameter table: one declaration per weight, and its initial values.

Each side maps its own names and layouts to this table in one place (`weights.py`), so gradients of both sides
can be compared. The fused query-key-value projection and the heads have their own axes. A split over heads is
a slice of one axis.

Logical axes: vocab V, position T, embed C, qkv 3, heads H, head_dim D = C/H, mlp M = 4C, expert E. The axis
choice has size E, too: it belongs to the router, which every device stores for all experts. With grouped
queries the heads of qkv are K. Each has a group of G + 2: G queries, then their key, then their value
(Megatron's order).
"""

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from compare.numerics.boxes import Box, Weights, full_box
from compare.spec.experiment import Experiment, Model

QKV = 3
MLP_RATIO = 4
STD = 0.02
"""Standard deviation of GPT-2's initial matrices, the default of `train.init_std`."""
DRAWN_AT_ONCE = 2**18
"""Elements that are drawn at one time, in float64."""


class Parameter(Struct, frozen=True):
    """One weight of the model: name, shape, meaning of each axis, and initial values."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    """Logical axis of each dimension; `spec.axes.SPLIT` maps it to the mesh axis that splits it."""
    init_std: float | None = None
    """Standard deviation of a matrix, whose initial values are normal; None for a vector."""
    init_constant: float = 0.0
    """Initial value of a vector: 1 for scales of norms, 0 for biases."""

    @property
    def is_matrix(self) -> bool:
        """Whether nanoGPT's parameter has two or more dimensions, and so decays, in any layout."""
        return self.init_std is not None

    @property
    def is_factor(self) -> bool:
        """Whether only products read it, or add it to their results: in 16 bits they round it first."""
        return self.name.startswith("blocks.") and ".norm" not in self.name and "choice" not in self.axes

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def parameter_table(model: Model) -> tuple[Parameter, ...]:
    """Every weight of the model in canonical order: embeddings, blocks 0 to L-1, final norm."""
    embeddings, final_norm = end_parameters(model)
    blocks = [parameter for layer in range(model.n_layer) for parameter in block_parameters(model, layer)]
    return (*embeddings, *blocks, *final_norm)


@functools.lru_cache(maxsize=64)
def end_parameters(model: Model) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
    """Parameters before and after the blocks."""
    width = model.n_embd
    token = Parameter("embedding.token", (model.vocab_size, width), ("vocab", "embed"), STD)
    position = Parameter("embedding.position", (model.block_size, width), ("position", "embed"), STD)
    return (token,) if model.position == "rope" else (token, position), tuple(_norm(model, "norm"))


@functools.lru_cache(maxsize=1024)
def block_parameters(model: Model, layer: int) -> tuple[Parameter, ...]:
    """The weights of one block. All blocks have the same shapes."""
    width, heads, inner = model.n_embd, model.n_head, MLP_RATIO * model.n_embd
    qkv, qkv_axes = qkv_dims(model)
    residual_std = STD / math.sqrt(2 * model.n_layer)  # GPT-2: two residual additions per block
    block = f"blocks.{layer}"
    out_axes = ("heads", "head_dim", "embed")
    up, down = ("embed", "mlp"), ("mlp", "embed")
    if experts := model.n_experts:
        mlp = [
            Parameter(f"{block}.mlp.router.weight", (width, experts), ("embed", "choice"), STD),
            Parameter(f"{block}.mlp.up.weight", (experts, width, inner), ("expert", *up), STD),
            Parameter(f"{block}.mlp.down.weight", (experts, inner, width), ("expert", *down), residual_std),
        ]
    else:
        mlp = [
            Parameter(f"{block}.mlp.up.weight", (width, inner), up, STD),
            *_bias(model, f"{block}.mlp.up.bias", (inner,), ("mlp",)),
            Parameter(f"{block}.mlp.down.weight", (inner, width), down, residual_std),
            *_bias(model, f"{block}.mlp.down.bias", (width,), ("embed",)),
        ]
    return (
        *_norm(model, f"{block}.norm1"),
        Parameter(f"{block}.attention.qkv.weight", (width, *qkv), ("embed", *qkv_axes), STD),
        *_bias(model, f"{block}.attention.qkv.bias", qkv, qkv_axes),
        Parameter(f"{block}.attention.out.weight", (heads, width // heads, width), out_axes, residual_std),
        *_bias(model, f"{block}.attention.out.bias", (width,), ("embed",)),
        *_norm(model, f"{block}.norm2"),
        *mlp,
    )


def qkv_dims(model: Model) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Sizes and logical axes of the fused projection's output for a token."""
    head_dim = model.n_embd // model.n_head
    if model.group == 1:
        return (QKV, model.n_head, head_dim), ("qkv", "heads", "head_dim")
    return (model.kv_heads, model.group + 2, head_dim), ("heads", "group", "head_dim")


def split_qkv(qkv: Any, group: int) -> tuple[Any, Any, Any]:
    """Queries (.., H, D), keys and values (.., K, D), of an array (.., 3, H, D) or (.., K, G + 2, D)."""
    if group == 1:
        return qkv[..., 0, :, :], qkv[..., 1, :, :], qkv[..., 2, :, :]
    *others, heads, _, head_dim = qkv.shape
    queries = qkv[..., :group, :].reshape(*others, heads * group, head_dim)
    return queries, qkv[..., group, :], qkv[..., group + 1, :]


def parameter_count(model: Model) -> int:
    """Number of weights, with the tied head once; in closed form, so that a large model takes no time."""
    embeddings, final_norm = end_parameters(model)
    ends = sum(parameter.size for parameter in (*embeddings, *final_norm))
    return ends + model.n_layer * sum(parameter.size for parameter in block_parameters(model, 0))


def decays(parameter: Parameter, decay: str) -> bool:
    """True if weight decay applies: to matrices only, or to `all`."""
    return decay == "all" or parameter.is_matrix


class SeedWeights(Weights):
    """The initial weights of an experiment's seed, in the dtype of stored weights.

    Each parameter is drawn in float64 from its own Philox stream, keyed by the seed and its name. So its
    values do not depend on the order of the table, the layout, or the framework. The stream has no random
    access: a box needs memory for itself only, but also the draws before it.
    """

    def __init__(self, experiment: Experiment):
        self._rows = {parameter.name: parameter for parameter in parameter_table(experiment.model)}
        self._seed, self._dtype = experiment.train.seed, storage_dtype(experiment)
        self._scale = experiment.train.init_std / STD
        super().__init__(self._rows, lambda name: self.boxes(name, [full_box(self._rows[name].shape)])[0])

    def boxes(self, name: str, boxes: Sequence[Box]) -> list[np.ndarray]:
        """Draw boxes of a tensor in one pass, some rows at a time."""
        row, found = self._rows[name], [np.empty(box.shape, self._dtype) for box in boxes]
        if row.init_std is None:
            for array in found:
                array.fill(row.init_constant)
            return found
        key = int.from_bytes(hashlib.sha256(f"{self._seed} {name}".encode()).digest()[:16], "little")
        generator = np.random.Generator(np.random.Philox(key=key))
        within, last = row.shape[1:], max((box.offset[0] + box.shape[0] for box in boxes), default=0)
        step = max(1, DRAWN_AT_ONCE // math.prod(within))
        for start in range(0, last, step):
            drawn = Box((start, *(0 for _ in within)), (min(step, last - start), *within))
            values = generator.normal(0.0, row.init_std * self._scale, drawn.shape)
            for box, array in zip(boxes, found, strict=True):
                if common := box.overlap(drawn):
                    array[common.within(box)] = values[common.within(drawn)]
        return found


def initial_parameters(experiment: Experiment) -> dict[str, np.ndarray]:
    """All initial weights of the seed: canonical name -> tensor of the table's shape."""
    return dict(SeedWeights(experiment))


def storage_dtype(experiment: Experiment) -> np.dtype:
    """The dtype of weights, gradients and moments: float64 under float64 compute, else float32."""
    return np.dtype("float64" if experiment.precision.dtype == "float64" else "float32")


def fingerprint(tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over names, shapes and values: equal if and only if the tensors are bitwise equal."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]  # read once, because it may be drawn
        digest.update(f"{name} {tensor.dtype.str} {tensor.shape}".encode())
        digest.update(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _bias(model: Model, name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> list[Parameter]:
    return [Parameter(name, shape, axes)] if model.bias else []


def _norm(model: Model, name: str) -> list[Parameter]:
    shape, axes = (model.n_embd,), ("embed",)
    scale = Parameter(f"{name}.scale", shape, axes, init_constant=1.0)
    return [scale] if model.norm == "rmsnorm" else [scale, *_bias(model, f"{name}.bias", shape, axes)]
