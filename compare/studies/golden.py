"""nanoGPT's own numbers, and every engine held to them.

All engines have one contract: a default that is wrong in it is wrong in all of them, and they agree. So
nanoGPT itself was run (`tests/make_golden.py`), and what it computed is kept as records like any other.
Whatever golden.toml does not name was nanoGPT's own default there, and is ours here. It was run twice: the
second time its `configure_optimizers` found `torch.optim.SGD` in AdamW's place, so that SGD's schedule,
clipping and decay are held, too.
"""

import hashlib
from pathlib import Path

import msgspec
from msgspec import Struct

from compare.contract.record import Record, read_record
from compare.contract.request import Request
from compare.contract.run_lock import lock_folder
from compare.execute.launch import EngineError, EnvironmentMissing, launch, prepare, require_devices
from compare.execute.paths import create_run_dir
from compare.execute.progress import Reporter
from compare.host.json_files import read_own_json, write_json
from compare.host.tensors import RecordError
from compare.judge.ladder import Verdict, climb
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, edited, revalidate
from compare.studies.cases import Case, Settings
from compare.studies.fitting import require_sides
from compare.studies.memory_estimate import require_memory

EXPERIMENT = "golden"
FOLDER = Path(__file__).parent.parent / "goldens" / "nanogpt"
SGD = {"name": "sgd", "momentum": 0.9}
"""What the second golden's optimizer has other than golden.toml's."""
REFERENCE = "nanoGPT"
PROVENANCE, OUTCOME = "provenance.json", "golden.json"


class Provenance(Struct, frozen=True, kw_only=True):
    """Origin of a golden, and what its files must be."""

    source: str
    """The repository whose code was run."""
    commit: str
    ran: dict[str, str]
    """SHA-256 of each of its files that was executed, by name."""
    files: dict[str, str]
    """SHA-256 of each file of the record, by name."""


class Held(Struct, frozen=True, kw_only=True):
    """The outcome: every engine's verdict against nanoGPT's numbers. Saved as golden.json."""

    experiment: Experiment
    provenance: Provenance
    verdicts: list[Verdict]
    failures: dict[str, str] = msgspec.field(default_factory=dict)
    """Engines that did not finish: why, by name."""
    left_out: dict[str, str] = {}
    """Engines that were not named and cannot express the layout: why, by name."""

    @property
    def passed(self) -> bool:
        """True if every engine finished, and every rung was there and held."""
        whole = all(verdict.passed and not verdict.skipped for verdict in self.verdicts)
        return whole and bool(self.verdicts) and not self.failures

    def sentence(self) -> str:
        """The verdict over all engines, in one line."""
        for name, why in self.failures.items():
            return f"{name} did not finish: {why}"
        for verdict in self.verdicts:
            if not verdict.passed:
                return f"{verdict.candidate} against {REFERENCE}: {verdict.sentence()}"
            for rung, why in verdict.skipped.items():
                return f"{verdict.candidate} against {REFERENCE}: {rung} was not compared: {why}"
        names = ", ".join(verdict.candidate for verdict in self.verdicts)
        worst = max(rung.error for verdict in self.verdicts for rung in verdict.rungs)
        rungs = min(len(verdict.rungs) for verdict in self.verdicts)
        left_out = "".join(f"; {name} was left out ({why})" for name, why in self.left_out.items())
        return f"PASS: {names}: equal to {REFERENCE} on {rungs} rungs; worst error {worst:.1e}{left_out}"


def folder_of(optimizer: str) -> Path:
    """Where the record of a training by adamw or sgd is."""
    return FOLDER if optimizer == "adamw" else FOLDER.with_name(f"{FOLDER.name}-{optimizer}")


def golden_cases(experiment: Experiment, engines: list[str]) -> list[Case]:
    """Each engine with the experiment as it is, and with SGD."""
    by_sgd = revalidate(edited(experiment, {"optimizer": SGD}))
    return [
        Case(name=f"{engine}{suffix}", engine=engine, experiment=one)
        for engine in engines
        for suffix, one in (("", experiment), (".sgd", by_sgd))
    ]


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def read_golden(folder: Path = FOLDER) -> tuple[Record, Provenance]:
    """nanoGPT's record, and where it is from.

    Raises:
        EnvironmentMissing: a file of it is missing, or is not the one that was made.
    """
    try:
        provenance = read_own_json(folder / PROVENANCE, Provenance)
        for name, digest in provenance.files.items():
            if sha256(folder / name) != digest:
                raise EnvironmentMissing(
                    f"{folder / name} is not what nanoGPT left (another SHA-256): install shardpair anew"
                )
        return read_record(folder, requested=False), provenance
    except (OSError, RecordError) as error:
        raise EnvironmentMissing(f"the golden in {folder} cannot be read: {error}") from None


def hold(
    experiment: Experiment,
    engines: list[str],
    *,
    run_dir: str,
    settings: Settings,
    reporter: Reporter,
    left_out: dict[str, str] | None = None,
) -> tuple[Held, Path]:
    """Train the golden experiment with each engine, by AdamW and by SGD, and hold each record to nanoGPT's.

    Args:
        experiment: golden.toml's, under any layout.
        engines: in the order in which they run; one that does not finish is noted, and the others run.
        run_dir: folder of the results, which must not exist; '' names one.
        settings: how to run.
        reporter: told of the progress.
        left_out: engines that are not held because they cannot express the layout, and why.

    Returns:
        The outcome, and the folder that it and the records are saved in.

    Raises:
        ExperimentError, EnvironmentMissing: before the first process starts.
    """
    goldens = {name: read_golden(folder_of(name)) for name in ("adamw", "sgd")}
    require_devices(experiment, settings.platform)
    for engine in engines:
        ENGINES[engine].require_experiment(experiment, platform=settings.platform)
        require_memory(engine, experiment, platform=settings.platform)
    require_sides(engines, settings.pythons)
    folder = create_run_dir(EXPERIMENT, run_dir)
    with lock_folder(folder):
        prepared = prepare(experiment, folder)
        cases = golden_cases(prepared.experiment, engines)
        requests = {case.name: _request(case, prepared.corpus_sha256, settings) for case in cases}
        reporter.start(requests, folder)
        verdicts, failures = [], {}
        for name, request in requests.items():
            golden, provenance = goldens[request.experiment.optimizer.name]
            try:
                with reporter.engine(name) as on_step:
                    record = launch(request, folder / name, pythons=settings.pythons, on_step=on_step)
                verdicts.append(climb(golden, record, reference_name=REFERENCE, name=name))
            except (EngineError, RecordError) as error:
                failures[name] = str(error)
                if isinstance(error, EngineError):
                    reporter.failed(error)
        held = Held(
            experiment=experiment,
            provenance=provenance,
            verdicts=verdicts,
            failures=failures,
            left_out=left_out or {},
        )
        write_json(folder / OUTCOME, held)
    return held, folder


def _request(case: Case, corpus_sha256: str, settings: Settings) -> Request:
    return Request(
        engine=case.engine,
        experiment=case.experiment,
        platform=settings.platform,
        ladder=True,
        later_step=case.experiment.train.max_iters,  # nanoGPT's weights are kept after its last step
        corpus_sha256=corpus_sha256,
        timeout_s=settings.timeout_s,
        cache_dir=settings.cache_dir,
    )
