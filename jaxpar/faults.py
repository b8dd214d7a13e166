"""Faults to plant on purpose, so that the ladder is seen to catch them.

`FAULTS` maps a name to the engines that can express it and a context manager factory; the fault holds for
whatever is traced and loaded inside.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from unittest.mock import patch

import jax
import numpy as np

from compare.contract.experiment import ExperimentError, Layout, Model
from jaxpar import collectives, weights
from jaxpar.manual import data_parallel

NEED_REPLICAS = ("dropped_all_reduce", "sum_for_mean")
MOVED, BY = "blocks.0.mlp.up.weight", 1e-3


def plant(fault: str, *, engine: str, layout: Layout) -> AbstractContextManager:
    """The fault as a context manager; "" plants none.

    Raises:
        ExperimentError: an unknown fault, or one that this engine or layout cannot express.
    """
    if not fault:
        return nullcontext()
    if fault not in FAULTS:
        raise ExperimentError(f"fault = {fault}: {engine} knows {', '.join(FAULTS)}")
    engines, patched = FAULTS[fault]
    if engine not in engines:
        raise ExperimentError(
            f"fault = {fault}: {engine} cannot express it: XLA inserts the reduction, not we"
        )
    if fault in NEED_REPLICAS and layout.dp_replicate == 1:
        raise ExperimentError(
            f"fault = {fault}: nothing is reduced with layout.dp_replicate = 1: give 2 or more"
        )
    return patched()


def _dropped_all_reduce() -> AbstractContextManager:
    """Gradients stay each replica's own. The check of varying axes would refuse that when it is traced."""
    stack = ExitStack()
    stack.enter_context(patch.object(data_parallel, "all_reduce", lambda x, axis: x))
    stack.enter_context(patch.object(collectives, "per_device", partial(jax.shard_map, check_vma=False)))
    return stack


def _sum_for_mean() -> AbstractContextManager:
    return patch.object(data_parallel, "axis_size", lambda axis: 1)


def _moved_weight() -> AbstractContextManager:
    load = weights.from_canonical

    def moved(named: Mapping[str, np.ndarray], model: Model) -> dict:
        weight = named[MOVED].copy()
        weight.flat[0] += BY
        return load({**named, MOVED: weight}, model)

    return patch.object(weights, "from_canonical", moved)


FAULTS: dict[str, tuple[tuple[str, ...], Callable[[], AbstractContextManager]]] = {
    "dropped_all_reduce": (("jax-manual",), _dropped_all_reduce),
    "sum_for_mean": (("jax-manual",), _sum_for_mean),
    "moved_weight": (("jax-compiler", "jax-manual"), _moved_weight),
}
