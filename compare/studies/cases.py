"""Cases of a comparison: an engine under a layout each, and the settings that they all run with.

`run` makes one case of each engine; `check` makes one unsharded reference and a case of every engine and
gradient synchronisation.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from compare.contract.request import Platform
from compare.execute.hosts import HERE, Hosts
from compare.spec.engines.registry import ENGINES, REFERENCE
from compare.spec.experiment import Experiment, ExperimentError, revalidate
from compare.studies.presets import spread


class Interrupted(KeyboardInterrupt):
    """Ctrl-C; every process was ended. The message is one line that says what is kept, and how to go on."""

    def __init__(self, message: str, folder: Path = Path()):
        super().__init__(message)
        self.folder = folder


class Case(Struct, frozen=True, kw_only=True):
    """One engine under one layout, and perhaps a planted fault."""

    name: str
    """Unique in its comparison; also its folder."""
    engine: str
    experiment: Experiment
    fault: str = ""


class Settings(Struct, frozen=True, kw_only=True):
    """Settings of a run that change nothing in what it computes."""

    platform: Platform = "cpu"
    timeout_s: float = 600.0
    cache_dir: str = ""
    ladder: bool = True
    """Leave gradients, weights and moments for the ladder; without them losses and norms are compared."""
    profile: bool = False
    """Leave the timeline of one step."""
    pythons: Mapping[str, str] = {}
    hosts: Hosts = HERE
    """Where engines run."""
    init_from: str = ""
    """A file of weights to begin with; see `freeze_weights`."""
    tensorboard: str = ""
    """A folder for TensorBoard's event files; empty for none."""
    later_step: int = 0
    """After which step the ladder has weights once more; 0 for step `LATER_STEP`, or the last but one."""
    resume: str = ""
    """Where checkpoints are to go on from; see `resuming.checkpoints_for`."""


def engine_cases(experiment: Experiment, engines: list[str]) -> list[Case]:
    """One case for each engine under the experiment's own layout."""
    return [Case(name=engine, engine=engine, experiment=experiment) for engine in engines]


def ladder_cases(experiment: Experiment, engines: list[str], devices: int) -> list[Case]:
    """The unsharded reference, then every engine on one device and on each rung of its own ladder.

    The reference is torchpar's plain module on one device: PyTorch's autograd, no container around it,
    no collective. It is the first case.
    """
    one = spread(experiment, "single")
    cases = [Case(name="reference", engine=REFERENCE, experiment=one)]
    for name in engines:
        engine = ENGINES[name]
        cases.append(Case(name=f"{name}-1", engine=name, experiment=one))
        for sync in engine.gradient_sync if devices > 1 else ():
            chosen = sync if engine.offers_choice else experiment.layout.gradient_sync
            sharded = with_layout(one, dp_replicate=devices, gradient_sync=chosen)
            cases.append(Case(name=f"{name}-{devices}-{sync}", engine=name, experiment=sharded))
    return cases


def with_layout(experiment: Experiment, **fields: object) -> Experiment:
    """The experiment under a layout with other fields. Raises ExperimentError if that cannot work."""
    layout = msgspec.structs.replace(experiment.layout, **fields)
    return revalidate(msgspec.structs.replace(experiment, layout=layout))


def why_not(engine: str, experiment: Experiment, platform: Platform) -> str:
    """Why an engine refuses an experiment; '' if it does not."""
    try:
        ENGINES[engine].require_experiment(experiment)
    except ExperimentError as error:
        return str(error)
    return ""
