"""Faults to plant on purpose, so that the ladder is seen to catch them.

`FAULTS` maps a name to the engines that can express it, what a layout must have for it to show, and a
context manager factory; the fault holds for whatever is traced and loaded inside.

A reduction that is missing is planted as one in which only the first device's part counts: the check of
varying axes, which stays on, would refuse a reduction that is simply left out when it is traced.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from compare.contract.axes import BATCH, TP
from compare.contract.communication import NORM
from compare.contract.experiment import ExperimentError, Layout, Model
from jaxpar import optimizer, weights
from jaxpar.comm import collectives
from jaxpar.manual import data_parallel, fully_sharded, norm, pipeline_parallel, tensor_parallel
from jaxpar.model import Linear

MOVED, BY = "blocks.0.mlp.up.weight", 1e-3
MANUAL, BOTH = ("jax-manual",), ("jax-compiler", "jax-manual")


@dataclass(frozen=True)
class Fault:
    """One mistake, who can make it, and where it shows."""

    engines: tuple[str, ...]
    shows: Callable[[Layout], bool]
    needs: str
    """What `shows` asks for, as keys of the layout."""
    patched: Callable[[], AbstractContextManager]


def plant(fault: str, *, engine: str, layout: Layout) -> AbstractContextManager:
    """The fault as a context manager; "" plants none.

    Raises:
        ExperimentError: an unknown fault, or one that this engine or layout cannot express.
    """
    if not fault:
        return nullcontext()
    if fault not in FAULTS:
        raise ExperimentError(f"fault = {fault}: {engine} knows {', '.join(FAULTS)}")
    known = FAULTS[fault]
    if engine not in known.engines:
        raise ExperimentError(
            f"fault = {fault}: {engine} cannot express it: its arrays are whole, and XLA decides what moves"
        )
    if not known.shows(layout):
        raise ExperimentError(f"fault = {fault}: it does not show in this layout: give {known.needs}")
    return known.patched()


def _first_only(x: jax.Array, axis: str) -> jax.Array:
    """Zero on all devices but the first of an axis: then a sum over the axis is no sum."""
    return jnp.where(lax.axis_index(axis) == 0, x, jnp.zeros_like(x))


def _without_sum(module: Any, *names: str, axis: str) -> AbstractContextManager:
    stack = ExitStack()
    for name in names:
        reduce = getattr(module, name)

        def wrong(
            x: jax.Array, *arguments: Any, reduce: Callable[..., Any] = reduce, **options: Any
        ) -> jax.Array:
            return reduce(_first_only(x, axis), *arguments, **options)

        stack.enter_context(patch.object(module, name, wrong))
    return stack


def _dropped_all_reduce() -> AbstractContextManager:
    """Gradients are one replica's own."""
    return _without_sum(data_parallel, "all_reduce", axis=data_parallel.AXIS)


def _dropped_tp_all_reduce() -> AbstractContextManager:
    """A row-parallel product is one device's part."""
    return _without_sum(
        tensor_parallel, "reduce_from_region", "reduce_scatter_from_region", axis=tensor_parallel.AXIS
    )


def _missing_norm_psum() -> AbstractContextManager:
    """LayerNorms' gradients are those of one device's positions."""
    reduce = tensor_parallel.sum_partial_gradients

    def own(path: tuple[Any, ...], g: jax.Array) -> jax.Array:
        is_norm = any(str(getattr(key, "key", "")).startswith("norm") for key in path)
        return _first_only(g, tensor_parallel.AXIS) if is_norm else g

    def wrong(gradients: Any, placements: Any) -> Any:
        return reduce(jax.tree_util.tree_map_with_path(own, gradients), placements)

    return patch.object(tensor_parallel, "sum_partial_gradients", wrong)


def _overwritten_microbatch() -> AbstractContextManager:
    """A microbatch's gradient takes the place of those before it."""
    return patch.object(pipeline_parallel, "add", lambda total, gradients: gradients)


def _stale_tied_copy() -> AbstractContextManager:
    """Of the embedding's gradient only the first stage's part counts: the lookup's, not the head's."""
    total = pipeline_parallel.sum_tied_gradients

    def own(path: tuple[Any, ...], g: jax.Array) -> jax.Array:
        is_embedding = getattr(path[0], "key", "") == "embedding"
        return _first_only(g, pipeline_parallel.AXIS) if is_embedding else g

    def wrong(gradients: Any, placements: Any) -> Any:
        return total(jax.tree_util.tree_map_with_path(own, gradients), placements)

    return patch.object(pipeline_parallel, "sum_tied_gradients", wrong)


def _doubled_row_bias() -> AbstractContextManager:
    """A row-parallel bias is added on each device, before the sum."""

    def wrong(self: tensor_parallel.RowParallelLinear, x: jax.Array) -> jax.Array:
        return self.g(Linear.__call__(self, x))

    return patch.object(tensor_parallel.RowParallelLinear, "__call__", wrong)


def _norm_counts_replicas_twice() -> AbstractContextManager:
    """Squares are summed over every axis, whether a leaf is split over it or repeated."""

    def wrong(total: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        for axis in (*BATCH, TP):
            total = collectives.all_reduce(total, axis, purpose=NORM)
        return total

    return patch.object(norm, "sum_over", wrong)


def _wrong_optimizer_shard() -> AbstractContextManager:
    """Each device updates its shard with the gradients of the next device's."""
    clip = optimizer.clip_by_given_norm

    def wrong(max_norm: float) -> optax.GradientTransformationExtraArgs:
        right = clip(max_norm)

        def update(updates: Any, state: Any, params: Any = None, **of_step: Any):
            shifted = jax.tree.map(lambda g: collectives.shift(g, fully_sharded.AXIS), updates)
            return right.update(shifted, state, params, **of_step)

        return optax.GradientTransformationExtraArgs(right.init, update)

    return patch.object(optimizer, "clip_by_given_norm", wrong)


def _sum_for_mean() -> AbstractContextManager:
    return patch.object(data_parallel, "axis_size", lambda axis: 1)


def _moved_weight() -> AbstractContextManager:
    load = weights.from_canonical

    def moved(named: Mapping[str, np.ndarray], model: Model) -> dict:
        weight = named[MOVED].copy()
        weight.flat[0] += BY
        return load({**named, MOVED: weight}, model)

    return patch.object(weights, "from_canonical", moved)


def _replicated(layout: Layout) -> bool:
    return layout.dp_replicate > 1


def _tensor_parallel(layout: Layout) -> bool:
    return layout.tp > 1


def _pipelined(layout: Layout) -> bool:
    return layout.pp > 1


REPLICAS, TENSOR = "layout.dp_replicate = 2 or more", "layout.tp = 2 or more"
PIPELINE = "layout.pp = 2 or more"
FAULTS: dict[str, Fault] = {
    "dropped_all_reduce": Fault(MANUAL, _replicated, REPLICAS, _dropped_all_reduce),
    "sum_for_mean": Fault(MANUAL, _replicated, REPLICAS, _sum_for_mean),
    "moved_weight": Fault(BOTH, lambda layout: True, "any", _moved_weight),
    "wrong_optimizer_shard": Fault(
        MANUAL, lambda layout: layout.zero > 0, "layout.zero = 1 or more", _wrong_optimizer_shard
    ),
    "norm_counts_replicas_twice": Fault(
        MANUAL,
        lambda layout: _replicated(layout) or _tensor_parallel(layout),
        f"{REPLICAS}, or {TENSOR}",
        _norm_counts_replicas_twice,
    ),
    "dropped_tp_all_reduce": Fault(MANUAL, _tensor_parallel, TENSOR, _dropped_tp_all_reduce),
    "doubled_row_bias": Fault(MANUAL, _tensor_parallel, TENSOR, _doubled_row_bias),
    "missing_norm_psum": Fault(
        MANUAL,
        lambda layout: layout.sequence_parallel,
        "layout.sequence_parallel = true",
        _missing_norm_psum,
    ),
    "overwritten_microbatch": Fault(MANUAL, _pipelined, PIPELINE, _overwritten_microbatch),
    "stale_tied_copy": Fault(MANUAL, _pipelined, PIPELINE, _stale_tied_copy),
}
