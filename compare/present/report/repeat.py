"""The command that makes a comparison again: rebuilt from what was asked, and proven to ask the same."""

import shlex
from pathlib import Path

import msgspec

from compare.judge.comparison import Comparison
from compare.numerics.initial_weights import INIT
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import revalidate
from compare.studies.cases import Case, engine_cases, ladder_cases
from compare.studies.known_faults import fault_cases, planted
from compare.studies.matrix_cells import STUDIES, matrix_cases
from compare.studies.presets import Said, settings_in

EXPERIMENT = "experiment.toml"
"""The resolved experiment, saved beside the page."""


def repeat_command(comparison: Comparison) -> str:
    """The shell command that makes this comparison again, for the folder of its page.

    Its cases are rebuilt from it: it is given only if they are exactly those that were asked for, by name,
    engine, fault, layout and every other field of their experiments.

    Returns:
        The command; '' if none makes this.
    """
    try:
        revalidate(comparison.experiment)  # a layout that its presets replaced may be none
        options, cases = _REBUILD[comparison.study](comparison)
    except (KeyError, ValueError):  # made by no command, or by one of another version
        return ""
    if not _same(cases, comparison):
        return ""
    has_ladder = comparison.study == "profile" or all(
        request.ladder for request in comparison.requests.values()
    )
    if comparison.platform != "cpu":
        options += ["--platform", comparison.platform]
    if not has_ladder:
        options.append("--no_ladder")
    if any(request.init_from for request in comparison.requests.values()):
        options += ["--init_from", INIT]
    if resumed := {request.resume.checkpoint for request in comparison.requests.values() if request.resume}:
        if len(resumed) > 1:  # each engine from its own: the folder of their run
            resumed = {str(Path(folder).parents[2]) for folder in resumed}
        options += ["--resume", *sorted(resumed)]
    return shlex.join(["shardpair", comparison.study, EXPERIMENT, *_data(comparison), *options])


def _run(comparison: Comparison) -> tuple[list[str], list[Case]]:
    engines = list(comparison.requests)
    return ["--engines", *engines], engine_cases(comparison.experiment, engines)


def _check(comparison: Comparison) -> tuple[list[str], list[Case]]:
    devices = max(request.experiment.layout.devices for request in comparison.requests.values())
    engines = [name.removesuffix("-1") for name in comparison.requests if name.removesuffix("-1") in ENGINES]
    return (
        ["--devices", str(devices), "--engines", *engines],
        ladder_cases(comparison.experiment, engines, devices),
    )


def _faults(comparison: Comparison) -> tuple[list[str], list[Case]]:
    asked = {name: planted(name) for name in comparison.requests if name != "reference"}
    names = list(dict.fromkeys(fault.name for fault, _ in asked.values()))
    engines = [engine for engine in ENGINES if engine in {engine for _, engine in asked.values()}]
    spread = [
        comparison.requests[name].experiment.layout for name, (fault, _) in asked.items() if not fault.preset
    ]
    devices = spread[0].devices if spread else 4
    return (
        ["--devices", str(devices), "--engines", *engines, "--names", *names],
        fault_cases(comparison.experiment, engines, names=names, devices=devices),
    )


def _matrix(comparison: Comparison) -> tuple[list[str], list[Case]]:
    (study,) = (name for name in STUDIES if f"matrix-{name.replace(', ', '-')}" == comparison.name)
    cells = [name.split(".") for name in comparison.requests if name != "reference"]
    engines = [engine for engine in ENGINES if [engine] in [cell[:1] for cell in cells]]
    layouts = list(dict.fromkeys(layout for _, layout in cells))
    return (
        ["--studies", study, "--engines", *engines, "--layouts", *layouts],
        matrix_cases(
            comparison.experiment, engines, layouts, Said(file=settings_in(comparison.experiment.layout))
        )[0],
    )


_REBUILD = {"run": _run, "profile": _run, "check": _check, "faults": _faults, "matrix": _matrix}


def _same(cases: list[Case], comparison: Comparison) -> bool:
    """True if cases are those that were asked for. The place of the data is another matter: see `_data`."""
    if [case.name for case in cases] != list(comparison.requests):
        return False
    return all(
        (case.engine, case.fault, case.experiment)
        == (
            request.engine,
            request.fault,
            msgspec.structs.replace(request.experiment, data=case.experiment.data),
        )
        for case, request in zip(cases, comparison.requests.values(), strict=True)
    )


def _data(comparison: Comparison) -> list[str]:
    """Place of the tokens, seen from the page's folder, as `freeze_data` froze it."""
    source = comparison.experiment.data.source
    frozen = next(iter(comparison.requests.values())).experiment.data.source
    if source == frozen:
        return []
    return ["--data.source", Path(frozen).name if source == "stdlib" else frozen]
