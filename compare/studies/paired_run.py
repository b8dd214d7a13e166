"""Train several cases of one experiment, each in a fresh process, and hold them against the first."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import field

from compare.contract.exit_codes import STOPPED
from compare.contract.record import MANIFEST, Record, read_record
from compare.contract.request import Request, ResumePoint, rungs_asked_for
from compare.contract.run_lock import lock_folder
from compare.execute.here import here_and_now
from compare.execute.launch import EngineError, Prepared, launch, prepare
from compare.execute.paths import remove_run_dir
from compare.execute.progress import Reporter
from compare.execute.tensorboard import events, in_turn
from compare.host.tensors import RecordError
from compare.judge.acceptance import objections
from compare.judge.comparison import Comparison, judged, read_comparison, read_saved
from compare.numerics.parameters import parameter_count, storage_dtype
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.cases import Case, Settings
from compare.studies.fitting import require_case, require_sides
from compare.studies.own_weights import Init, freeze_weights
from compare.studies.resuming import require_resumable, resumes
from compare.studies.runner import Runner, new_folder, saved_in
from compare.terminal import human_bytes

LATER_STEP = 20


def compare_cases(
    name: str,
    experiment: Experiment,
    cases: list[Case],
    *,
    command: str,
    run_dir: str,
    settings: Settings,
    reporter: Reporter,
    needs_first: bool = True,
    left_out: Mapping[str, str] | None = None,
) -> tuple[Comparison, Path]:
    """Run every case, hold each against the first, and save the outcome after each.

    A case that does not finish is noted as a failure, and the others still run.

    Args:
        name: of the comparison, for people.
        experiment: as the user gave it; each case has its own variation of it.
        cases: in the order in which they run; the first is the reference.
        command: of `shardpair`, that goes on with it if it is interrupted.
        run_dir: folder of the results, which must not exist; '' names one after the comparison.
        settings: how to run.
        reporter: told of the progress.
        needs_first: the first case is the only possible reference: nothing runs on without it.
        left_out: engines that are no case because they cannot be one, and why; the outcome says so.

    Returns:
        The outcome, and the folder it is saved in.

    Raises:
        ExperimentError, EnvironmentMissing: before the first process starts.
        EngineError: no case finished, or not the first one where that is needed.
        Interrupted: Ctrl-C. What was finished is saved; `continue_cases` goes on.
    """
    if settings.profile and settings.hosts.several:
        raise ExperimentError("a timeline is taken on one host: leave --hosts and --launcher out")
    for case in cases:
        require_case(case.engine, case.experiment, platform=settings.platform, hosts=settings.hosts)
        require_resumable(case.engine, settings.resume, settings.init_from)
    require_sides([case.engine for case in cases], settings.pythons)
    reporter.reads(experiment)
    with new_folder(name, run_dir) as folder:
        planned = _planned(name, experiment, cases, folder, command=command, settings=settings)
        planned = msgspec.structs.replace(planned, left_out=dict(left_out or {}))
        training = _Cases(judged(planned, {}), folder, settings, reporter, {}, needs_first)
        return training.run(), folder


def _planned(
    name: str, experiment: Experiment, cases: list[Case], folder: Path, *, command: str, settings: Settings
) -> Comparison:
    """The requests of all cases, before any of them runs."""
    prepared = prepare(experiment, folder)
    init = freeze_weights(settings.init_from, experiment, folder, pythons=settings.pythons)
    try:
        resumed = resumes(settings.resume, [case.name for case in cases], experiment, prepared.corpus_sha256)
    except BaseException:
        remove_run_dir(folder)
        raise
    requests = {case.name: _request(case, prepared, settings, init, resumed) for case in cases}
    _require_room(requests, folder)
    return Comparison(
        study=command,
        name=name,
        experiment=experiment,
        platform=settings.platform,
        circumstances=here_and_now(),
        requests=requests,
    )


def continue_cases(
    folder: Path, *, settings: Settings, reporter: Reporter, needs_first: bool = True
) -> Comparison:
    """Run what a comparison still lacks: cases that did not finish, or whose turn did not come.

    What an unfinished case left is kept beside it, as NAME.unfinished-1.

    Args:
        folder: of the comparison.
        settings: time-out, cache and interpreters; everything else is as the comparison asked.
        reporter, needs_first: as for `compare_cases`.

    Raises:
        RecordError: the folder holds no comparison, or a garbled one.
        ExperimentError: another version of the source began it: its records and ours do not prove each other.
        EngineError, Interrupted: as `compare_cases`.
    """
    saved = read_saved(folder)
    if link := next((folder / name for name in saved.requests if (folder / name).is_symlink()), None):
        raise RecordError(f"{link} is a link: nothing is trained, or set aside, outside of {folder}")
    if saved.tensors_removed:
        return _complete(folder)
    with saved_in(folder, Comparison) as saved:
        found = {name: _finished(folder / name, request) for name, request in saved.requests.items()}
        records = {name: record for name, record in found.items() if record}
        for name in found.keys() - records.keys():
            _keep_aside(folder / name)
        anew = {"timeout_s": settings.timeout_s, "cache_dir": settings.cache_dir}
        requests = {
            name: request if name in records else msgspec.structs.replace(request, **anew)
            for name, request in saved.requests.items()
        }
        again = msgspec.structs.replace(saved, requests=requests, failures={})
        training = _Cases(judged(again, records), folder, settings, reporter, records, needs_first)
        return training.run()


def _complete(folder: Path) -> Comparison:
    """A comparison whose tensors were removed: it had passed, and nothing can be held against it any more."""
    try:
        return read_comparison(folder)[0]
    except RecordError as error:
        raise RecordError(
            f"{error}; the tensors of {folder} were removed once they had passed, so that it cannot go on: "
            f"run it anew, with --keep_tensors"
        ) from None


class _Cases(Runner[Comparison]):
    """A piece is a case that has no record yet; it is judged as soon as it has one."""

    records: dict[str, Record]
    needs_first: bool
    errors: list[EngineError] = field(default_factory=list)

    def pieces(self) -> Iterator[str]:
        self.reporter.start(self.outcome.requests, self.folder, finished=self.records)
        for name in self.outcome.requests:
            if name not in self.records:
                yield name
            if self.errors and self.errors[-1].exit_code == STOPPED:  # whoever asked wants the machine
                raise EngineError(
                    f"{self.errors[-1]}: `shardpair resume {self.folder}` goes on", exit_code=STOPPED
                )
            if self.errors and self.needs_first and not self.records:
                break
        if not self.records:
            said = "; ".join(map(str, self.errors))
            raise EngineError(said, exit_code=self.errors[0].exit_code, log=self.errors[0].log)

    def measured(self, piece: str) -> Comparison:
        request, settings = self.outcome.requests[piece], self.settings
        drawn = events(settings.tensorboard, piece, request.experiment)
        with self.reporter.engine(piece) as told, drawn as file:
            how = {"pythons": settings.pythons, "hosts": settings.hosts}
            record = launch(request, self.folder / piece, on_step=in_turn(told, file.step), **how)
            file.evaluations(record.evaluations)
        done = judged(self.outcome, {**self.records, piece: record}, known=self.outcome.verdicts)
        self.records[piece] = record
        return done

    def failed(self, piece: str, error: EngineError) -> Comparison:
        self.errors.append(error)
        return msgspec.structs.replace(self.outcome, failures=self.outcome.failures | {piece: str(error)})

    def kept(self) -> str:
        return f"Finished and kept: {', '.join(self.outcome.cases) or 'nothing yet'}. {self.rest()}"


def _finished(folder: Path, request: Request) -> Record | None:
    """A case's record, if it is whole and what was asked for."""
    if not (folder / MANIFEST).is_file():
        return None
    try:
        record = read_record(folder)
        return record if record.request == request and not objections(record) else None
    except RecordError:
        return None


def _keep_aside(folder: Path) -> None:
    if folder.exists():
        numbers = range(1, len(list(folder.parent.iterdir())) + 1)
        names = (folder.with_name(f"{folder.name}.unfinished-{number}") for number in numbers)
        with lock_folder(folder):  # a side that somebody started by itself may be at work in there
            folder.rename(next(path for path in names if not path.exists()))


def _request(
    case: Case, prepared: Prepared, settings: Settings, init: Init, resumed: Mapping[str, ResumePoint]
) -> Request:
    resume = resumed.get(case.name, msgspec.UNSET)
    steps = case.experiment.train.max_iters - (resume.step if resume else 0)
    return Request(
        engine=case.engine,
        experiment=msgspec.structs.replace(case.experiment, data=prepared.experiment.data),
        platform=settings.platform,
        ladder=settings.ladder,
        later_step=settings.later_step
        or min(LATER_STEP, max(steps - 1, 1)),  # the last step's weights have a rung of their own
        corpus_sha256=prepared.corpus_sha256,
        timeout_s=settings.timeout_s,
        cache_dir=settings.cache_dir,
        init_from=init.path,
        init_sha256=init.sha256,
        resume=resume,
        profile=settings.profile,
        fault=case.fault,
    )


def _require_room(requests: Mapping[str, Request], folder: Path) -> None:
    """Refuse a ladder whose tensors the disk cannot hold. Raises ExperimentError with both numbers."""
    needed = sum(
        len(rungs_asked_for(request))
        * parameter_count(request.experiment.model)
        * storage_dtype(request.experiment).itemsize
        for request in requests.values()
    )
    free = shutil.disk_usage(folder).free
    if needed > free:
        remove_run_dir(folder)
        raise ExperimentError(
            f"{folder}: gradients, weights and moments of {len(requests)} runs need {human_bytes(needed)}, "
            f"and {human_bytes(free)} are free: give a --run_dir on a larger disk, or --no_ladder to compare "
            f"losses and norms alone"
        )
