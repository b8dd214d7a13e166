"""A sweep: one experiment under several strategies, and over several numbers of devices.

A strategy is a preset. What runs with the same batch is one comparison, whose first case is one unsharded
device: so a sweep measures strategies and proves that they compute the same. On one device every strategy is
`single`.

    plain             one number of devices: strategies side by side
    strong scaling    the batch stays, devices grow: the same work is shared out
    weak scaling      the batch grows with the devices: each has as much work as one had alone
"""

from typing import Literal

from msgspec import Struct

from compare.contract.request import Platform
from compare.spec.engines.registry import ENGINES, REFERENCE
from compare.spec.experiment import Experiment, ExperimentError, edited
from compare.studies.cases import Case
from compare.studies.fitting import refusal
from compare.studies.memory_estimate import require_memory
from compare.studies.presets import NOTHING_SAID, Said, check_presets, spread

SINGLE = "single"
FIRST = "reference"
"""The case that the others of its batch are held against."""

Scaling = Literal["none", "strong", "weak"]


class SweepPlan(Struct, frozen=True, kw_only=True):
    """A sweep as it was asked for."""

    name: str
    """Of the experiment."""
    experiment: Experiment
    """Its batch is that of the step; in weak scaling of one device."""
    strategies: list[str]
    """Names in PRESETS."""
    engines: list[str]
    devices: list[int]
    """Increasing; one number where nothing is scaled."""
    scaling: Scaling = "none"
    platform: Platform = "cpu"
    ladder: bool = True
    init_from: str = ""
    said: Said = NOTHING_SAID
    """Fields of the experiment's layout that win over those of its strategies."""

    def with_batch_for(self, devices: int) -> Experiment:
        """The experiment with the batch of so many devices, before it is spread over them."""
        if self.scaling != "weak":
            return self.experiment
        batch_size = devices * self.experiment.train.batch_size
        return edited(self.experiment, {"train": {"batch_size": batch_size}})

    @property
    def begins_with_one_device(self) -> bool:
        """True if scaling is measured against one device, of each engine."""
        return self.devices[0] == 1


class Batch(Struct, frozen=True, kw_only=True):
    """What runs with one batch: one comparison."""

    name: str
    """Of its folder."""
    experiment: Experiment
    cases: list[Case]
    """The reference first. Where one device cannot hold the model there is none, and the others are held
    against the first of them."""
    left_out: dict[str, str]
    """What cannot be a case, and why."""


def sweep_batches(plan: SweepPlan) -> list[Batch]:
    """The cases of a sweep, named ENGINE.STRATEGY.DEVICES.

    Raises:
        ExperimentError: nothing is left of it.
    """
    batches: dict[str, Batch] = {}
    widest = [(name, plan.devices[-1]) for name in plan.strategies if name != SINGLE]
    check_presets("--presets", plan.experiment.layout, widest, plan.said)
    for devices in plan.devices:
        experiment = plan.with_batch_for(devices)
        name = batch_name(experiment)
        if name not in batches:
            batches[name] = Batch(name=name, experiment=experiment, cases=[], left_out={})
            _add(batches[name], FIRST, REFERENCE, SINGLE, 1, plan)
        for engine in plan.engines:
            for strategy in plan.strategies if devices > 1 else [SINGLE]:
                count = 1 if strategy == SINGLE else devices
                if not (engine == REFERENCE and strategy == SINGLE):  # that is the reference
                    _add(batches[name], f"{engine}.{strategy}.{count}", engine, strategy, count, plan)
    kept = [batch for batch in batches.values() if _is_of_use(batch, plan)]
    if not kept:
        reasons = [why for batch in batches.values() for why in batch.left_out.values()]
        raise ExperimentError(f"no strategy is left: {'; '.join(dict.fromkeys(reasons))}")
    return kept


def batch_name(experiment: Experiment) -> str:
    """Of the batch that an experiment belongs to, and of its folder."""
    return f"batch-{experiment.train.batch_size}"


def is_a_row(experiment: Experiment, plan: SweepPlan) -> bool:
    """Whether a batch's reference is a strategy of the sweep too: one device, to measure others against."""
    if plan.scaling == "none":
        return True
    is_smallest = experiment.train == plan.with_batch_for(1).train
    return plan.begins_with_one_device and REFERENCE in plan.engines and is_smallest


def _is_of_use(batch: Batch, plan: SweepPlan) -> bool:
    """False if nothing is left to hold against the reference, and nobody asked for it alone."""
    asked = SINGLE in plan.strategies or plan.begins_with_one_device
    alone = asked and REFERENCE in plan.engines and is_a_row(batch.experiment, plan)
    return any(case.name != FIRST for case in batch.cases) or (alone and bool(batch.cases))


def _add(batch: Batch, name: str, engine: str, strategy: str, devices: int, plan: SweepPlan) -> None:
    """Add a case to its batch, once; or the reason why there is none."""
    if name in {case.name for case in batch.cases}:
        return
    try:
        experiment = spread(batch.experiment, strategy, devices, plan.said)
        case = Case(name=name, engine=engine, experiment=experiment)
        require_memory(engine, experiment, platform=plan.platform)
        why = refusal(ENGINES[engine], experiment.layout, preset=strategy, platform=plan.platform)
    except ExperimentError as error:
        why = str(error)
    if why:
        batch.left_out[name] = why
    else:
        batch.cases.append(case)
