"""`--dry_run`: the cases of a study before anything starts, with their memory and what is refused."""

import shlex
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from compare.contract.record import ON_HOST
from compare.execute.batch import batch_script, requests
from compare.execute.launch import EnvironmentMissing, visible_gpus
from compare.execute.launchers import Hosts
from compare.judge.outcome import Case, Outcome
from compare.numerics.data import open_corpus
from compare.setup.fitting import require_case, require_sides
from compare.setup.resuming import find_resume_points, require_resumable
from compare.setup.sources import check_weights, format_of_side
from compare.show.envelope import CaseState
from compare.show.findings import Column, Findings, by_reason, table_of
from compare.side.ending import BAD_REQUEST, MISSING
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import ExperimentError, to_toml
from compare.spec.xla import xla_options
from compare.system.tensors import RecordError
from compare.text import human_bytes, layout_in_words
from compare.theory.memory import KINDS, checkpoint_bytes
from compare.theory.peak import peak_estimate, peak_per_device

ESTIMATED = ("activations", "logits")
UNREAD = "-"  # in place of a digest: the data is opened, and not read to its end

Row = dict[str, Any]
"""A case: bytes of the fullest device by kind, and the reason why it is refused."""
TITLE = (
    f"The fullest device: {', '.join(KINDS)} in closed form; {', '.join(ESTIMATED)}, with gathered "
    f"parameters, buffers and temporaries, estimated"
)
COLUMNS = (
    Column[Row]("case", lambda case: case["name"]),
    Column[Row]("synchronisation", lambda case: case["gradient_sync"] or "refused"),
    Column[Row]("devices", lambda case: case["devices"], "d"),
    *(
        Column[Row](kind, lambda case, kind=kind: case["memory"][kind], human_bytes)
        for kind in (*KINDS, *ESTIMATED)
    ),
    Column[Row]("all", lambda case: sum(case["memory"].values()), human_bytes),
)


def preview(
    outcome: Outcome, *, pythons: Callable[[], Mapping[str, str]], hosts: Hosts, init_from: str, resume: str
) -> tuple[Findings, int]:
    """The plan of a study, and its exit code: 0, or the code of the first refusal."""
    experiment, platform, tokens = outcome.experiment, outcome.platform, list[int]()
    sides = [ENGINES[case.engine].side for case in outcome.cases.values()]

    steps_there = set[int]()

    def check_resume() -> None:
        for case in outcome.cases.values():
            require_resumable(case.engine, resume, init_from)
        points = find_resume_points(resume, outcome.cases, experiment, corpus_sha256="")
        steps_there.update(point.step for point in points.values())

    if platform == "gpu" and hosts.launcher == "local" and not visible_gpus():
        hosts = replace(hosts, elsewhere=True)
    errors = {
        name: _error(partial(require_case, case.engine, case.experiment, platform=platform, hosts=hosts))
        for name, case in outcome.cases.items()
    }
    inputs = [
        _error(lambda: require_sides(sides, pythons())),
        _error(lambda: tokens.append(len(open_corpus(experiment, validated_sha256=UNREAD).train))),
        _error(lambda: check_weights(init_from, experiment)),
        _error(check_resume),
    ]
    refusals = [error for error in inputs if error]
    refused = next(filter(None, [*errors.values(), *refusals]), None)
    cases = [_row(name, case, platform, errors[name]) for name, case in outcome.cases.items()]
    unread = bool(init_from) and format_of_side(Path(init_from))
    can_run = f"all of it can run, if {init_from} fits, which is read then" if unread else "all of it can run"
    verdict = "this would be refused, for the reasons above" if refused else can_run
    on_host = max(case["on_host"] for case in cases)
    saved = sum(checkpoint_bytes(case.experiment) for case in outcome.cases.values())
    steps = next(iter(outcome.cases.values())).experiment.train.max_iters
    refused_cases = {
        case["name"]: case["refusal"].removeprefix(f"{case['engine']}: ") for case in cases if case["refusal"]
    }
    gpus = max(case["devices"] for case in cases) // hosts.count if platform == "gpu" else 0
    script, unchecked = list[str](), ""
    if hosts.elsewhere and hosts.launcher == "slurm":
        unchecked = "hosts and their memory: this machine has no allocation"
        how = {"nodes": hosts.count, "gpus": gpus, "options": hosts.options}
        allocate = shlex.join(["salloc", *requests(hosts.count, gpus)])
        script = [f"start it with `{allocate}` and this command without --dry_run"]
        if outcome.line:  # not from Python
            script = [f"{script[0]}, or give sbatch this script:", batch_script(outcome.line, **how)]
    elif hosts.elsewhere:
        unchecked = "GPUs and their memory: no NVIDIA GPU is visible here"
    in_jax = [case.experiment.layout for case in outcome.cases.values() if ENGINES[case.engine].is_jax]
    options = [[f"{name}={value}" for name, value in xla_options(layout).items()] for layout in in_jax]
    xla = dict.fromkeys(", ".join(one) for one in options if one)
    facts = {
        "layout": "; ".join(dict.fromkeys(case["layout"] for case in cases)),
        "data": f"{tokens[0]:,} tokens of {experiment.data.source}, which are read when it runs"
        if tokens
        else "",
        "initial weights": init_from,
        "resumed": f"{resume}, from step {', '.join(map(str, steps_there))}" if steps_there else resume,
        "checkpoints": f"up to {human_bytes(saved)} on disk, of all cases together" if saved else "",
        "not checked": unchecked,
        "layout.xla": "; ".join(xla),
        "layout.offload": f"{human_bytes(on_host)} of a device's state on the host" if on_host else "",
    }
    found = Findings(
        study=outcome.study,
        is_dry_run=True,
        title="dry run",
        sentence=f"dry run: {len(cases)} case{'s' * (len(cases) != 1)} of {steps:,} steps; nothing was "
        f"started; {verdict}",
        cases={
            case["name"]: CaseState(
                engine=case["engine"],
                state="refused" if case["refusal"] else "planned",
                verdict=case["refusal"],
                against=outcome.cases[case["name"]].against,
            )
            for case in cases
        },
        values={
            "experiment": experiment,
            "platform": platform,
            "training_tokens": sum(tokens),
            "input_refusals": [*map(str, refusals)],
            "hosts": hosts.count,
            "cases": cases,
            "checkpoint_bytes": saved,
            "not_checked": unchecked,
            "batch_script": script[1] if len(script) > 1 else "",
        },
        passed=not refused,
        tables=[table_of(TITLE, COLUMNS, cases, words=2)],
        notes=[*(f"{name}: {value}" for name, value in facts.items() if value), *([] if refused else script)],
        warnings=[f"refused: {why}" for why in refusals],
        missing={
            ", ".join(names): f"would be refused: {why}" for why, names in by_reason(refused_cases).items()
        },
        left_out=outcome.left_out,
        spec=to_toml(experiment),
        command=outcome.line,
    )
    return found, 0 if not refused else MISSING if isinstance(refused, EnvironmentMissing) else BAD_REQUEST


def _error(attempt: Callable[[], object]) -> Exception | None:
    try:
        attempt()
    except (ExperimentError, RecordError, EnvironmentMissing) as error:
        return error
    return None


def _row(name: str, case: Case, platform: str, refusal: Exception | None) -> Row:
    engine, experiment = ENGINES[case.engine], case.experiment
    by_kind, sizes = peak_estimate(case.engine, experiment), peak_per_device(case.engine, experiment)
    fullest = sizes.index(max(sizes))
    memory = {kind: by_device[fullest] for kind, by_device in by_kind.items()}
    return {
        "name": name,
        "engine": case.engine,
        "layout": layout_in_words(experiment, platform),
        "devices": experiment.layout.devices,
        "gradient_sync": "" if refusal else engine.gradient_sync_for(experiment.layout),
        "on_host": memory.pop(ON_HOST, 0.0),
        "memory": memory,
        "refusal": str(refusal or ""),
    }
