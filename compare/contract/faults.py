"""Mistakes that a side plants in its own code, as data, so that the ladder is seen to catch them.

Each side has one table of them in its `faults`: a row says who makes the mistake, what a layout must have for
it to show, and how it is planted. Most are planted at the collectives, by kind, axis and purpose; the others
swap a function or a module for a wrong one. `compare.studies.faults` says which rung must turn red.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from msgspec import Struct

from compare.spec.axes import SHARDED_FROM
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, Layout, edited


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
SHARDED_PARAMETERS = Need(
    holds=lambda layout: layout.zero == SHARDED_FROM["parameters"],
    otherwise="no parameter is split: give layout.zero = 3",
)


class Ignored(Struct, frozen=True, kw_only=True):
    """A setting that an engine does not do as asked, though its manifest says so; it moves no number."""

    instead: Mapping[str, Mapping[str, object]]
    """Sections and fields as the engine runs them."""
    need: Need = ANY_LAYOUT

    def edit(self, experiment: Experiment) -> Experiment:
        """What is run instead of `experiment`."""
        return edited(experiment, self.instead)


IGNORED = {
    "ignored_gradient_sync": Ignored(instead={"layout": {"gradient_sync": "flat"}}, need=REPLICAS),
    "ignored_bucket_mb": Ignored(instead={"layout": {"bucket_mb": 25.0}}, need=REPLICAS),
    "ignored_schedule": Ignored(instead={"layout": {"schedule": "gpipe"}}, need=STAGES),
    "ignored_remat": Ignored(instead={"layout": {"remat": "none"}}),
    "ignored_loss_chunks": Ignored(instead={"train": {"loss_chunks": 1}}),
    "ignored_offload": Ignored(instead={"layout": {"offload": "none"}}),
    "ignored_sequence_parallel": Ignored(
        instead={"layout": {"sequence_parallel": False}}, need=SPLIT_SEQUENCE
    ),
    "ignored_zero": Ignored(instead={"layout": {"zero": 2}}, need=SHARDED_PARAMETERS),
    "ignored_reshard": Ignored(instead={"layout": {"reshard_after_forward": False}}, need=SHARDED_PARAMETERS),
    "ignored_dtype": Ignored(instead={"precision": {"dtype": "float32"}}),
}
"""By fault. Each must be asked for otherwise, to be ignored: see `compare.studies.faults`."""


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
