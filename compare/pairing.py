"""Train several cases of one experiment, each in a fresh process, and hold them against the first.

A case is an engine under a layout. `run` makes one case of each engine; `check` makes one unsharded
reference and a case of every engine and gradient synchronisation.
"""

import datetime
import platform as host
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from compare.contract.engines import ENGINES
from compare.contract.experiment import Experiment, revalidate
from compare.contract.parameters import parameter_count
from compare.contract.record import Platform, Record, Request, Step, read_json, read_record, write_json
from compare.costs import Cost, cost_of
from compare.launch import EngineError, Prepared, Pythons, launch, prepare, require_devices
from compare.numerics import Verdict, climb
from compare.paths import create_run_dir
from compare.presets import spread
from compare.progress import Reporter

COMPARISON = "comparison.json"
LATER_STEP = 20
LISTED = 4  # names in the one-line verdict; more are counted
LADDER_PARAMETERS = 20_000_000  # above this the ladder's tensors weigh more than they tell: half a GB a rung


class Case(Struct, frozen=True, kw_only=True):
    """One engine under one layout, and perhaps a planted fault."""

    name: str
    """Unique in its comparison; also its folder."""
    engine: str
    experiment: Experiment
    fault: str = ""


class Settings(Struct, frozen=True, kw_only=True):
    """How cases are run, as opposed to what they compute."""

    platform: Platform = "cpu"
    timeout_s: float = 600.0
    cache_dir: str = ""
    ladder: bool = True
    pythons: Pythons = Pythons()


class Comparison(Struct, frozen=True, kw_only=True):
    """The outcome: every case's verdict and cost. Saved as comparison.json beside the records."""

    name: str
    experiment: Experiment
    """As the user gave it, every field spelled out."""
    platform: str
    created_utc: str
    machine: str
    git_commit: str
    git_dirty: bool
    cases: list[str]
    """Names, which are folders; the first is the reference."""
    verdicts: list[Verdict]
    """Of every case but the first."""
    costs: list[Cost]
    """Of every case, in order."""
    versions: list[dict[str, str]]
    """Of Python and the packages that ran every case, in order."""
    failures: dict[str, str] = msgspec.field(default_factory=dict)
    """Cases that did not finish, where that was not the end of everything: why, by name."""

    @property
    def passed(self) -> bool:
        """Whether every case finished, and agrees with the reference on every rung."""
        return not self.failures and all(verdict.passed for verdict in self.verdicts)

    def sentence(self) -> str:
        """The verdict over all cases, in one line."""
        if self.failures:
            name, why = next(iter(self.failures.items()))
            return f"{name} did not finish: {why}"
        bad = next((verdict for verdict in self.verdicts if not verdict.passed), None)
        if bad:
            return f"{bad.candidate} against {bad.reference}: {bad.sentence()}"
        if not self.verdicts:
            return f"{self.cases[0]} ran alone: there was nothing to compare it with"
        names = [verdict.candidate for verdict in self.verdicts]
        others = ", ".join(names) if len(names) <= LISTED else f"{len(names)} cases"
        rungs = min(len(verdict.rungs) for verdict in self.verdicts)
        agree = "agrees" if len(self.verdicts) == 1 else "agree"
        return f"PASS: {others} {agree} with {self.cases[0]} on {rungs} rungs"


def engine_cases(experiment: Experiment, engines: list[str]) -> list[Case]:
    """One case for each engine under the experiment's own layout.

    Raises:
        ExperimentError: an engine cannot do what the layout asks of it.
    """
    for engine in engines:
        ENGINES[engine].gradient_sync_for(experiment.layout)
    return [Case(name=engine, engine=engine, experiment=experiment) for engine in engines]


def ladder_cases(experiment: Experiment, engines: list[str], devices: int) -> list[Case]:
    """The unsharded reference, then every engine on one device and on each rung of its own ladder.

    The reference is torchpar's plain module on one device: PyTorch's autograd, no container around it,
    no collective. It is the first case.
    """
    one = spread(experiment, "single")
    cases = [Case(name="reference", engine="torch-manual", experiment=one)]
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


def wants_ladder(experiment: Experiment) -> bool:
    """Whether a run leaves the ladder's tensors unless told otherwise: small models do."""
    return parameter_count(experiment.model) <= LADDER_PARAMETERS


def compare_cases(
    name: str,
    experiment: Experiment,
    cases: list[Case],
    *,
    run_dir: str,
    settings: Settings,
    reporter: Reporter,
    keep_going: bool = False,
) -> tuple[Comparison, Path]:
    """Run every case, hold each against the first, and save the outcome.

    Args:
        name: of the comparison, for people.
        experiment: as the user gave it; each case has its own variation of it.
        cases: in the order in which they run; the first is the reference.
        run_dir: folder of the results, which must not exist; '' names one after the comparison.
        settings: how to run.
        reporter: told of the progress.
        keep_going: note a case that does not finish as a failure, and go on; the reference must finish.

    Returns:
        The outcome, and the folder it is saved in.

    Raises:
        ExperimentError, EnvironmentMissing: before the first process starts.
        EngineError: a case did not finish; the records of those before it stay in the folder.
    """
    for case in cases:
        require_devices(case.experiment, settings.platform)
        ENGINES[case.engine].require(case.experiment.layout, platform=settings.platform)
    folder = create_run_dir(name, run_dir)
    prepared = prepare(experiment, folder)
    records: dict[str, Record] = {}
    failures: dict[str, str] = {}
    for case in cases:
        try:
            with reporter.engine(case.name, case.experiment.train.max_iters) as on_step:
                records[case.name] = _run_case(case, prepared, settings, on_step)
        except EngineError as error:
            if not (keep_going and records):
                raise
            failures[case.name] = str(error)
    reference, *others = records
    verdicts = [
        climb(records[reference], records[name], reference_name=reference, name=name) for name in others
    ]
    commit, dirty = _git_state()
    comparison = Comparison(
        name=name,
        experiment=experiment,
        platform=settings.platform,
        created_utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=f"{host.system()} {host.machine()}, {records[reference].manifest.device_kind}",
        git_commit=commit,
        git_dirty=dirty,
        cases=list(records),
        verdicts=verdicts,
        costs=[cost_of(record) for record in records.values()],
        versions=[record.manifest.versions for record in records.values()],
        failures=failures,
    )
    write_json(folder / COMPARISON, comparison)
    return comparison, folder


def read_comparison(folder: Path) -> tuple[Comparison, list[Record]]:
    """A finished comparison and its records. Raises FileNotFoundError if it is not complete."""
    comparison = read_json(folder / COMPARISON, Comparison)
    return comparison, [read_record(folder / case) for case in comparison.cases]


def _run_case(
    case: Case, prepared: Prepared, settings: Settings, on_step: Callable[[Step], None] | None
) -> Record:
    request = Request(
        engine=case.engine,
        experiment=msgspec.structs.replace(case.experiment, data=prepared.experiment.data),
        platform=settings.platform,
        ladder=settings.ladder,
        later_step=min(LATER_STEP, case.experiment.train.max_iters),
        corpus_sha256=prepared.corpus_sha256,
        timeout_s=settings.timeout_s,
        cache_dir=settings.cache_dir,
        fault=case.fault,
    )
    return launch(request, prepared.folder / case.name, pythons=settings.pythons, on_step=on_step)


def _git_state() -> tuple[str, bool]:
    """Commit and dirty flag of the source tree that runs; empty where it is not a git checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain", "--untracked-files=no"))
    except FileNotFoundError:  # no git on this machine
        return "", False
