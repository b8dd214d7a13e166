"""Mistakes that a side plants in its own code, as data, so that the ladder is seen to catch them.

Each side has one table of them in its `faults`: a row says who makes the mistake, what a layout must have for
it to show, and how it is planted. Most are planted at the collectives, by kind, axis and purpose; the others
swap a function or a module for a wrong one. `compare.studies.faults` says which rung must turn red.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from msgspec import Struct

from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import ExperimentError, Layout

Edits = Mapping[str, Mapping[str, object]]


class Need(Struct, frozen=True, kw_only=True):
    """A layout in which a fault shows."""

    holds: Callable[[Layout], bool]
    otherwise: str
    """Why it does not show in another one, and what to give."""


class PlantedFault(Struct, frozen=True):
    """One mistake, and the engines that make it in one way."""

    name: str
    folders: tuple[str, ...]
    """Of these engines, in their side's package."""
    need: Need
    plant: Callable[[], AbstractContextManager]
    """The mistake holds for what is built, traced and run inside."""


ANY_LAYOUT = Need(holds=lambda layout: True, otherwise="")
REPLICAS = Need(
    holds=lambda layout: layout.dp_replicate > 1,
    otherwise="there is one replica: give layout.dp_replicate = 2 or more",
)
SHARDS = Need(
    holds=lambda layout: layout.zero > 0, otherwise="no state is split: give layout.zero = 1 or more"
)
SPLIT_LAYERS = Need(
    holds=lambda layout: layout.tp > 1, otherwise="no layer is split: give layout.tp = 2 or more"
)
SPLIT_SEQUENCE = Need(
    holds=lambda layout: layout.sequence_parallel,
    otherwise="no sequence is split: give layout.sequence_parallel = true",
)
STAGES = Need(holds=lambda layout: layout.pp > 1, otherwise="there is one stage: give layout.pp = 2 or more")
REPEATED_PARAMETERS = Need(
    holds=lambda layout: layout.dp_replicate > 1 or layout.tp > 1,
    otherwise="no parameter is on two devices: give layout.dp_replicate or layout.tp = 2 or more",
)
IGNORED: Mapping[str, Edits] = {
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


def find_fault(faults: Sequence[PlantedFault], name: str, *, engine: str, layout: Layout) -> PlantedFault:
    """The row of a side's table for one of its engines.

    Raises:
        ExperimentError: an unknown engine or fault, one that the engine cannot make, or that does not show
            in this layout.
    """
    if engine not in ENGINES:
        raise ExperimentError(f"engine = {engine}: choose from {', '.join(ENGINES)}")
    if why := ENGINES[engine].impossible_faults.get(name):
        raise ExperimentError(f"fault = {name}: {engine} cannot make it: {why}")
    known = {fault.name: fault for fault in faults if ENGINES[engine].folder in fault.folders}
    if name not in known:
        raise ExperimentError(f"fault = {name}: {engine} knows {', '.join(known) or 'none'}")
    if not known[name].need.holds(layout):
        raise ExperimentError(f"fault = {name}: {known[name].need.otherwise}")
    return known[name]
