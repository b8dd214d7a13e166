"""Choice of engines that can do what is asked, and are installed; the others are named, with the reason."""

import sys
from collections.abc import Iterable, Mapping, Sequence

from compare.execute.hosts import HERE, Hosts
from compare.execute.launch import EnvironmentMissing, require_devices
from compare.execute.packages import missing_package, why_not_python
from compare.spec.engines.engine import Engine
from compare.spec.engines.registry import ENGINES, side_of
from compare.spec.experiment import Experiment, ExperimentError, Layout
from compare.studies.memory_estimate import require_memory


def fitting(engines: Sequence[str], layout: Layout, *, platform: str) -> tuple[list[str], dict[str, str]]:
    """Choose the engines that a layout fits.

    Args:
        engines: names in ENGINES.
        layout: what they should do.
        platform: cpu or gpu.

    Returns:
        Those that can, in their order; and why the others cannot, by name.

    Raises:
        ExperimentError: none can.
    """
    left_out = {}
    for name in engines:
        try:
            ENGINES[name].require(layout)
        except ExperimentError as error:
            left_out[name] = str(error)
    able = [name for name in engines if name not in left_out]
    if not able:
        raise ExperimentError(f"no engine can do this: {'; '.join(dict.fromkeys(left_out.values()))}")
    return able, left_out


def refusal(engine: Engine, layout: Layout, *, preset: str, platform: str = "cpu") -> str:
    """Reason why an engine is left out of a comparison of presets; empty if it is not.

    Args:
        engine: which.
        layout: of the preset.
        preset: its name. The variants of ddp are one and the same where the choice is not ours.
        platform: cpu or gpu.
    """
    try:
        engine.require(layout)
    except ExperimentError as reason:
        return str(reason)
    only_data_parallel = layout.dp_replicate == layout.devices > 1
    if only_data_parallel and preset != "ddp" and not engine.offers_choice:
        return f"the same as ddp: {engine.name} chooses for itself"
    return ""


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


def installed(engines: Sequence[str], pythons: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Choose the engines whose packages are there.

    Args:
        engines: names in ENGINES.
        pythons: side -> the interpreter that it runs in; this one where a side is missing.

    Returns:
        Those that can start, in their order; and what the others lack, by name.

    Raises:
        EnvironmentMissing: none can.
    """
    left_out = {}
    for name in engines:
        engine = ENGINES[name]
        if why := missing_package(engine, pythons.get(engine.side, sys.executable)):
            left_out[name] = why
    able = [name for name in engines if name not in left_out]
    if not able:
        raise EnvironmentMissing("; ".join(f"{name}: {why}" for name, why in left_out.items()))
    return able, left_out
