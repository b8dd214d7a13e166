"""Mistakes that a side plants in its own code, as data, so that the ladder is seen to catch them.

Each side has one table of them in its `faults`. Most are planted at the collectives, by kind, axis and
purpose; the others swap a function or a module for a wrong one. `commands.faults` says in which layout each
shows, and at which rung.
"""

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

from msgspec import Struct

from compare.numerics.boxes import Given, Weights
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import ExperimentError


class PlantedFault(Struct, frozen=True):
    """One mistake, and the engines that make it in one way."""

    name: str
    folders: tuple[str, ...]
    """Of these engines, in their side's package."""
    plant: Callable[[], AbstractContextManager]
    """The mistake holds for what is built, traced and run inside."""


IGNORED: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "ignored_gradient_sync": {"layout": {"gradient_sync": "flat"}},
    "ignored_bucket_mb": {"layout": {"bucket_mb": 25.0}},
    "ignored_schedule": {"layout": {"schedule": "gpipe"}},
    "ignored_remat": {"layout": {"remat": "none"}},
    "ignored_loss_chunks": {"train": {"loss_chunks": 1}},
    "ignored_offload": {"layout": {"offload": "none"}},
    "ignored_sequence_parallel": {"layout": {"sequence_parallel": False}},
    "ignored_zero": {"layout": {"zero": 2}},
    "ignored_reshard": {"layout": {"reshard_after_forward": False}},
    "ignored_dtype": {"precision": {"dtype": "float32"}},
}
"""By fault, sections and fields as the engine runs them, though its manifest says what was asked for.

No side plants these: `read_request` gives it the other experiment. They move no number of the training."""


def planted(fault: str, *, engine: str) -> AbstractContextManager:
    """A fault as an engine makes it, by its side's table; nothing if it is '' or one of `IGNORED`.

    Only a run with a fault imports the table. Raises ExperimentError: the engine does not make it.
    """
    if not fault or fault in IGNORED:
        return nullcontext()
    table = importlib.import_module(f"{ENGINES[engine].side}.faults").FAULTS
    known = {one.name: one for one in table if ENGINES[engine].folder in one.folders}
    if fault not in known:
        raise ExperimentError(f"fault = {fault}: {engine} knows {', '.join(known) or 'none'}")
    return known[fault].plant()


def moved_weight(weights: Weights) -> Weights:
    """First weights, of which one is a little away."""
    name, by = "blocks.0.mlp.up.weight", 1e-3
    moved = dict(weights)
    moved[name] = moved[name].copy()
    moved[name].flat[0] += by
    return Given(moved)
