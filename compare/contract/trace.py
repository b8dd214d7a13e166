"""Trace of one step: the output of each place of the model in forward, and its gradient in backward.

A side writes a trace if `Request.trace` is set, of all passes of the first step. Each tensor is whole: put
together from the parts of all devices, in one layout for both sides. jaxpar's `measure.trace.trace_step(run)`
returns forward and backward, NumPy arrays by place. torchpar's `measure.trace` observes the step.

    place                       dims after A, B, T     meaning
    embedding                   C                      token plus position vectors, after dropout
    blocks.L.norm1              C                      output of the first norm
    blocks.L.attention.qkv      3 H D, or K G+2 D      output of the projection, before RoPE
    blocks.L.attention.core     H D                    softmax(q k) v, before the out projection
    blocks.L.attention.out      C                      output of the out projection, before dropout
    blocks.L.norm2              C                      output of the second norm
    blocks.L.mlp.up             M                      output of the first linear map, before the activation
    blocks.L.mlp.down           C                      output of the second linear map, before dropout
    blocks.L.mlp.router         E                      weight of each chosen expert, 0 for all others
    blocks.L.mlp.experts        C                      weighted sum of the chosen experts, before dropout
    blocks.L.residual           C                      residual stream after the block
    norm                        C                      output of the last norm
    loss                        only A                 mean loss of a pass, with the load-balance loss

Linear maps include their bias. With experts a block has the places router and experts instead of up and down.
The canonical parameter table has the dims of qkv (`compare.numerics.parameters.qkv_dims`). Heads,
features, rows and positions are in the order of the whole model and batch, without padding. Microbatches of a
pipeline are rows of their pass.

A gradient is the derivative of the step's loss: the mean over passes of the pass's mean loss over all
devices. So a gradient has the factor 1 / A, and none of the loss scale or of the number of devices. The
gradient of `loss` is 1 / A. The gradient of a router weight goes through the weighted sum alone, and is 0 for
experts that were not chosen. Each tensor is stored in the dtype of stored weights.

Some tensors are copied on all devices of tp. If the copies are not bitwise equal, a side may also write the
copy of device r, as PLACE@tp=r. PLACE is the copy of device 0.

A passes, B rows of a pass over all devices, T positions, C embedding, M inner features. E experts, L block.
H heads, K heads of keys and values, G = H / K, D head_dim.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from msgspec import Struct

from compare.contract.request import Request
from compare.numerics.context import order_of_positions
from compare.numerics.initial_weights import write_weights
from compare.numerics.parameters import MLP_RATIO, qkv_dims, storage_dtype
from compare.spec.axes import CP, ROWS, SPLIT, TP
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, Layout, edited
from compare.system.tensors import Tensors

FORWARD, BACKWARD = "trace-forward.safetensors", "trace-backward.safetensors"
"""Files of a trace, below the folder of the record: tensors by the name of their place."""
COPY = "@tp="
"""Between a place and the device of tp, in the name of a copy that differs from the copy of device 0."""
LOSS = "loss"
ROUTER = "mlp.router"
MOST_BYTES = 2**31
"""Largest trace, of forward and backward together: one process holds it."""


class Place(Struct, frozen=True):
    """A place of the model, with the whole shape and the logical axes of its tensor."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    """pass, row, position, and the logical axes of the parameter table (`compare.numerics.parameters`)."""


def places(experiment: Experiment) -> tuple[Place, ...]:
    """All places of a model, in the order of computation. Backward reaches them in the opposite order."""
    model, train = experiment.model, experiment.train
    width, heads, inner = model.n_embd, model.n_head, MLP_RATIO * model.n_embd
    passes = train.gradient_accumulation_steps
    tokens = (passes, train.batch_size, model.block_size)

    def place(name: str, shape: tuple[int, ...] = (width,), axes: tuple[str, ...] = ("embed",)) -> Place:
        return Place(name, (*tokens, *shape), ("pass", "row", "position", *axes))

    def block(name: str) -> list[Place]:
        second = (
            [place(f"{name}.{ROUTER}", (model.n_experts,), ("choice",)), place(f"{name}.mlp.experts")]
            if model.n_experts
            else [place(f"{name}.mlp.up", (inner,), ("mlp",)), place(f"{name}.mlp.down")]
        )
        return [
            place(f"{name}.norm1"),
            place(f"{name}.attention.qkv", *qkv_dims(model)),
            place(f"{name}.attention.core", (heads, width // heads), ("heads", "head_dim")),
            place(f"{name}.attention.out"),
            place(f"{name}.norm2"),
            *second,
            place(f"{name}.residual"),
        ]

    blocks = [one for number in range(model.n_layer) for one in block(f"blocks.{number}")]
    return (place("embedding"), *blocks, place("norm"), Place(LOSS, (passes,), ("pass",)))


def split_dims(place: Place, layout: Layout) -> dict[str, tuple[int, list[np.ndarray]]]:
    """Mesh axes that split a place: the dim that an axis splits, and the indices of each of its devices.

    Axes with one device are left out. Indices are of the whole tensor, in the order in which a device has
    them. Under sequence parallelism tp splits positions, except between the linear layers of a block.
    """
    found, degrees = {}, layout.axes
    if "row" in place.axes:
        dim = place.axes.index("row")
        share_of_row = np.arange(place.shape[dim]) // (place.shape[dim] // layout.data_parallel)
        below = layout.data_parallel
        for axis in ROWS:
            below //= degrees[axis]
            device_of_row = share_of_row // below % degrees[axis]
            found[axis] = dim, [np.flatnonzero(device_of_row == r) for r in range(degrees[axis])]
    if "position" in place.axes:
        dim = place.axes.index("position")
        by_device = np.split(order_of_positions(place.shape[dim], layout), layout.cp)
        found[CP] = dim, by_device
        if layout.sequence_parallel and place.axes[-1] == "embed":
            parts = [np.split(positions, layout.tp) for positions in by_device]
            found[TP] = dim, [np.concatenate(part) for part in zip(*parts, strict=True)]
    for dim, logical in enumerate(place.axes):
        if SPLIT.get(logical) == TP:
            found[TP] = dim, np.array_split(np.arange(place.shape[dim]), layout.tp)
    return {axis: how for axis, how in found.items() if degrees[axis] > 1}


def trace_bytes(experiment: Experiment) -> int:
    """Size of both files of a trace, in bytes."""
    elements = sum(math.prod(place.shape) for place in places(experiment))
    return 2 * elements * storage_dtype(experiment).itemsize


def trace_request(request: Request) -> Request:
    """The request for a trace of the first step of another request: one step, not timed and not compiled.

    Programs of inductor compute several places in one kernel, so PyTorch runs operator by operator.
    """
    one_step = {
        "train": {"max_iters": request.first_step + 1, "eval_interval": 0},
        "checkpoint": {"every": 0},
        "layout": {"compile": "none"},
    }
    return Request(
        engine=request.engine,
        experiment=edited(request.experiment, one_step),
        platform=request.platform,
        trace=True,
        corpus_sha256=request.corpus_sha256,
        timeout_s=request.timeout_s,
        cache_dir=request.cache_dir,
        init_from=request.init_from,
        init_sha256=request.init_sha256,
        resume=request.resume,
    )


def why_no_trace(request: Request) -> str:
    """The reason why a run cannot be traced; '' if it can."""
    engine = ENGINES[request.engine]
    if engine.is_peer:
        return f"{engine.name} is a peer: its program has no places that correspond"
    if engine.side == "jaxpar" and (stages := request.experiment.layout.pp) > 1:
        return (
            f"{engine.name} with layout.pp = {stages}: the program of a tick has no places: trace an "
            "engine of torchpar, or a layout without pp"
        )
    if (size := trace_bytes(request.experiment)) > MOST_BYTES:
        return (
            f"a trace would have {size / 1e9:.1f} GB, and the most is {MOST_BYTES / 1e9:.1f} GB: lower "
            "train.batch_size, gradient_accumulation_steps, model.block_size or model.n_layer"
        )
    return ""


def write_trace(
    folder: Path,
    experiment: Experiment,
    forward: Mapping[str, np.ndarray],
    backward: Mapping[str, np.ndarray],
) -> None:
    """Write a trace into the folder of a record: whole tensors by place, of any dtype.

    Raises ValueError: a place is missing or unknown, or its tensor has another shape.
    """
    dtype, shapes = storage_dtype(experiment), {place.name: place.shape for place in places(experiment)}
    for file, tensors in ((FORWARD, forward), (BACKWARD, backward)):
        found = {name: tensor.shape for name, tensor in tensors.items() if COPY not in name}
        for name in sorted(shapes.keys() | found.keys()):
            if found.get(name) != shapes.get(name):
                raise ValueError(f"{file}: {name} has shape {found.get(name)} instead of {shapes.get(name)}")
        write_weights(folder / file, {name: tensor.astype(dtype) for name, tensor in tensors.items()})


def read_trace(folder: Path) -> tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]:
    """Forward and backward of a trace, by place, each tensor read on access. Raises RecordError."""
    return Tensors(folder / FORWARD), Tensors(folder / BACKWARD)
