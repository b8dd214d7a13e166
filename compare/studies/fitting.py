"""Choice of engines that can do what is asked, and are installed; the others are named, with the reason."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from compare.execute.hosts import HERE, Hosts
from compare.execute.launch import EnvironmentMissing, require_devices
from compare.execute.packages import missing_package, why_not_python
from compare.spec.engines.registry import ENGINES, side_of
from compare.spec.experiment import Experiment, ExperimentError, Layout, edited
from compare.studies.memory_estimate import require_memory

Fit = Callable[[str, Experiment], Experiment]
"""How an engine trains an experiment. Raises ExperimentError if it does not."""


def as_it_is(engine: str, experiment: Experiment) -> Experiment:
    """The experiment itself."""
    return experiment


def as_preset(engine: str, experiment: Experiment) -> Experiment:
    """The experiment as an engine has its preset: a composition with a pipeline under GPipe if it lacks 1F1B.

    Raises:
        ExperimentError: it chooses its gradient synchronisation itself, so that this is the same as ddp.
    """
    layout, able = experiment.layout, ENGINES[engine]
    only_data_parallel = layout.dp_replicate == layout.devices > 1
    if only_data_parallel and layout.gradient_sync != Layout().gradient_sync and not able.offers_choice:
        raise ExperimentError(f"the same as ddp: {engine} chooses for itself")
    is_composed, schedules = layout.devices > layout.pp > 1, able.layouts.schedules
    if is_composed and layout.schedule not in schedules and "gpipe" in schedules:
        return edited(experiment, {"layout": {"schedule": "gpipe"}})
    return experiment


def require_case(engine: str, experiment: Experiment, *, platform: str, hosts: Hosts = HERE) -> None:
    """Refuse a case before anything starts.

    Raises:
        ExperimentError: its engine cannot express it, or it needs more devices or memory than there are.
        EnvironmentMissing: platform gpu without one.
    """
    require_devices(experiment, platform, hosts)
    ENGINES[engine].require_experiment(experiment)
    require_memory(engine, experiment, platform=platform)


def require_sides(engines: Iterable[str], pythons: Mapping[str, str]) -> None:
    """Refuse engines whose side this Python, which is to run it, has not. Another was tried with its flag.

    Raises:
        EnvironmentMissing: naming what is missing, and the flag.
    """
    for side in {side_of(name).name: side_of(name) for name in engines}.values():
        is_this = pythons.get(side.name, sys.executable) == sys.executable
        if is_this and (why := why_not_python(side, sys.executable)):
            raise EnvironmentMissing(f"{side.name}: {why} with --{side.python_flag}")


Choice = tuple[list[str], dict[str, str]]
"""Engines in their order; and why others are left out, by name."""


def fitting(engines: Sequence[str], layout: Layout) -> Choice:
    """Choose the engines that can do a layout. Raises ExperimentError: none can."""

    def why_not(engine: str) -> str:
        try:
            ENGINES[engine].require(layout)
        except ExperimentError as error:
            return str(error)
        return ""

    able, left_out = _choice(engines, why_not)
    if not able:
        raise ExperimentError(f"no engine can do this: {'; '.join(dict.fromkeys(left_out.values()))}")
    return able, left_out


def installed(engines: Sequence[str], pythons: Mapping[str, str]) -> Choice:
    """Choose the engines whose packages the Python of their side has; this one where none is named.

    Raises:
        EnvironmentMissing: none can start.
    """

    def why_not(engine: str) -> str:
        return missing_package(ENGINES[engine], pythons.get(side_of(engine).name, sys.executable))

    able, left_out = _choice(engines, why_not)
    if not able:
        raise EnvironmentMissing("; ".join(f"{name}: {why}" for name, why in left_out.items()))
    return able, left_out


def _choice(engines: Sequence[str], why_not: Callable[[str], str]) -> Choice:
    reasons = {engine: why_not(engine) for engine in engines}
    able = [engine for engine, why in reasons.items() if not why]
    return able, {engine: why for engine, why in reasons.items() if why}
