"""A study: named cases of an experiment, the value kept of each, and tables of these values.

A study is a class in compare/commands. Its docstring is its help, and its fields are its flags. A command
calls `Study.__call__`, then `run`, `plan` and `run.rounds.run_missing`, the loop over the cases. The methods
from `command` on are for subclasses: `resolve` gives the experiment, `cases` the processes to run, `keep` the
value kept of a record, and `findings` the tables. `commands.registry` names all studies.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import msgspec
import tyro
from msgspec.structs import replace

from compare.contract.record import Record
from compare.execute.folders import RUNS, can_be_folder, create_run_dir, default_cache, remove_run_dir
from compare.execute.launch import launch, prepare
from compare.execute.this_machine import here_and_now, require_same_source
from compare.flags import StudyFlags, find_pythons, hosts_of
from compare.formats.nanogpt import is_config, sizes_in
from compare.judge.outcome import Case, Grid, Outcome, read_outcome, require_judged
from compare.judge.verdict import Verdict
from compare.numerics.data import open_corpus
from compare.run.metrics import figures
from compare.run.rounds import run_missing
from compare.setup import dry_run
from compare.setup.effects import require_effects
from compare.setup.fitting import require_case, require_disk, require_sides
from compare.setup.presets import SPREAD
from compare.setup.resuming import find_resume_points, require_resumable
from compare.setup.sources import freeze_weights, with_model_of
from compare.show.findings import Findings, findings_of
from compare.show.page import write_page
from compare.show.terminal import print_findings
from compare.side.run_lock import lock_folder
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, edited
from compare.terminal import errors_console, printable, results_console

LATER_STEP = 20
"""Steps after which the ladder records the weights once more; in a shorter run after the last but one."""
OF_LAYOUTS = dict.fromkeys(f"layout.{field}" for field in SPREAD)
"""`Study.fixed` of a study that sets the layouts itself."""
WITH_CONTINUE = {
    *("continue", "anyway", "quiet", "json", "rows", "fail_on_unexpected", "timeout_s", "cache_dir"),
    *("jax_python", "torch_python", "launcher", "launcher_options", "hosts", "hostfile"),
}
"""Flags allowed with --continue: where and how engines run, and what is printed."""
MAX_TIMEOUT_S = 1_000_000.0  # eleven days; poll(2) counts milliseconds in 32 bits
PAGES = {"run": "report.html"}
"""Names of pages, by study. Default: STUDY.html."""


class Study(StudyFlags, frozen=True, kw_only=True):
    """A question about an experiment. A subclass has a docstring of its own."""

    continue_: Annotated[str, tyro.conf.arg(name="continue", metavar="RUN_DIR")] = ""
    """Folder of a study: train the cases that have not finished, in this folder. `shardpair resume` trains
    more steps from checkpoints, in a new folder."""
    init_from: str = ""
    """Initial weights instead of the seed's: a safetensors file with shardpair's or nanoGPT's names, or
    anything that `shardpair convert` reads. Nothing in it is executed."""
    cache_dir: str = default_cache()
    """JAX's compilation cache; '' for none. It is not used for several CPU devices: XLA loses the order of
    their collectives."""
    dry_run: bool = False
    """Start nothing: print the resolved experiment, the layout in words, memory per device, and what is
    refused. The exit code is that of the run: 2, or 3 if this machine lacks something. Hosts of SLURM and
    GPUs that are not here are taken as given; for SLURM a batch script is printed."""

    fixed: ClassVar[Mapping[str, object]] = {}
    """Fields that the study sets, such as `train.max_iters`, and their values; None for computed values.
    A flag for such a field is refused."""
    needs: ClassVar[Mapping[str, str]] = {"checkpoint.keep": "checkpoint.every"}
    """Flags that have no effect without another one. They are refused without it."""
    keeps_records: ClassVar[bool] = False
    """Keep the folders of cases after their values are kept."""
    needs_reference: ClassVar[bool] = False
    """Skip cases whose reference failed."""

    def __call__(self) -> int:
        """Run the study and print its findings. Returns 0 if it is complete and passes, else 1."""
        if self.dry_run:
            found, code = self.preview()
            if not self.json:
                results_console().print(found.spec)
            print_findings(found, as_json=self.json)
            return code
        outcome, folder = self.run()
        return show(type(self), outcome, folder, as_json=self.json)

    def preview(self) -> tuple[Findings, int]:
        """The findings of a dry run, and its exit code. Starts nothing. Raises ExperimentError."""
        if self.continue_:
            raise ExperimentError("--dry_run is for a new run: leave it out with --continue")
        return dry_run.preview(
            self.plan(),
            pythons=functools.partial(find_pythons, self),
            hosts=hosts_of(self, dry_run=True),
            init_from=self.init_from,
            resume=self.source,
        )

    def run(self) -> tuple[Outcome, Path]:
        """Run all cases, or with --continue the missing ones. Prints nothing on stdout.

        Raises:
            ExperimentError, EnvironmentMissing: before the first process starts.
            EngineError: no case has finished.
            KeyboardInterrupt: Ctrl-C. The message says what is saved, and how to continue.
        """
        pythons, hosts = find_pythons(self), hosts_of(self)
        if self.continue_:
            folder = Path(self.continue_)
            if others := sorted(self.given - WITH_CONTINUE):
                flags = ", ".join(f"--{name}" for name in others)
                raise ExperimentError(
                    f"--continue {folder} goes on with the flags used there: leave out {flags}"
                )
            with lock_folder(folder):
                study, saved = self._read_saved(folder)
                if saved.is_complete:  # nothing to write: the folder may be read-only
                    return saved, folder
                return run_missing(study, saved, folder, pythons=pythons, hosts=hosts), folder
        planned = self.plan()
        for case in planned.cases.values():
            if case.request.profile and hosts.several:
                raise ExperimentError("a timeline is taken on one host: leave --hosts and --launcher out")
            require_case(case.engine, case.experiment, platform=self.platform, hosts=hosts)
            require_resumable(case.engine, self.source, self.init_from)
        require_sides([ENGINES[case.engine].side for case in planned.cases.values()], pythons)
        for name, why in planned.left_out.items() if not self.quiet else ():
            errors_console().print(f"{name} is left out: {why}", style="yellow")
        folder = create_run_dir(planned.name, self.run_dir)
        with lock_folder(folder):
            try:
                frozen = self._freeze(planned, folder, pythons)
                begun = self.begin(replace(frozen, circumstances=here_and_now()))
            except BaseException:
                remove_run_dir(folder)
                raise
            return run_missing(self, begun, folder, pythons=pythons, hosts=hosts), folder

    def plan(self) -> Outcome:
        """The study before anything starts. Raises ExperimentError."""
        self._require_effects()
        if not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise ExperimentError(
                f"--timeout_s {self.timeout_s} must be more than 0 and at most {MAX_TIMEOUT_S}"
            )
        if self.cache_dir and not can_be_folder(Path(self.cache_dir)):
            raise ExperimentError(
                f"--cache_dir {self.cache_dir} cannot be written: give another folder, or '' for none"
            )
        experiment = self.resolve()
        cases, left_out = self.cases(experiment)
        if not cases and left_out:
            raise ExperimentError(f"nothing is left to run: {'; '.join(dict.fromkeys(left_out.values()))}")
        cases = {
            name: replace(case, request=replace(case.request, platform=self.platform))
            for name, case in cases.items()
        }
        require_effects(self.given, cases.values())
        if self.keeps_records:
            require_disk([case.request for case in cases.values()], Path(self.run_dir or RUNS))
        name = Path(self.experiment).stem
        return Outcome(
            study=self.command,
            name=name if self.command in ("run", name) else f"{self.command}-{name}",
            line=self.line,
            experiment=experiment,
            platform=self.platform,
            options={
                name: msgspec.to_builtins(value, enc_hook=str)
                for name in self.own_flags()
                if (value := getattr(self, name)) is not None
            },
            rounds=getattr(self, "rounds", 1),
            keeps_records=self.keeps_records,
            cases=cases,
            left_out=left_out,
        )

    def _require_effects(self) -> None:
        """Reject flags without effect. Raises ExperimentError."""
        for flag in self.fixed:
            if flag in self.given:
                raise ExperimentError(f"--{flag} has no effect: {self.command} sets it; leave it out")
        if "train.init_std" in self.given and (weights := self.init_from or self.source):
            raise ExperimentError(f"--train.init_std has no effect on the weights of {weights}: leave it out")
        for flag, other in self.needs.items():
            value, needed = (functools.reduce(getattr, name.split("."), self) for name in (flag, other))
            if flag in self.given and value and not needed:
                raise ExperimentError(f"--{flag} has no effect without --{other}: give both, or neither")

    def _freeze(self, planned: Outcome, folder: Path, pythons: Mapping[str, str]) -> Outcome:
        """The plan with requests that any process on any host understands: data, weights, checkpoints."""
        data, corpus_sha256 = prepare(planned.experiment, folder)
        init = freeze_weights(self.init_from, planned.experiment, folder, pythons=pythons)
        resumed = find_resume_points(self.source, planned.cases, planned.experiment, corpus_sha256)
        cases = {}
        for name, case in planned.cases.items():
            request, resume = case.request, resumed.get(name, msgspec.UNSET)
            steps = case.experiment.train.max_iters - (resume.step if resume else 0)
            later = request.later_step
            request = replace(
                request,
                experiment=replace(case.experiment, data=data),
                corpus_sha256=corpus_sha256,
                timeout_s=self.timeout_s,
                cache_dir=self.cache_dir,
                **init,
                resume=resume,
                # The last step's weights have a rung of their own.
                later_step=min(LATER_STEP, max(steps - 1, 1)) if later == LATER_STEP else later,
            )
            cases[name] = replace(case, request=request)
        return replace(planned, cases=cases)

    def _read_saved(self, folder: Path) -> tuple[Self, Outcome]:
        """The study in the folder of --continue, with this one's interpreters, hosts and progress."""
        saved = read_outcome(folder)
        if saved.study != self.command:
            raise ExperimentError(
                f"--continue {folder}: it is another study: `shardpair {saved.study}` continues it"
            )
        require_records(saved, folder)
        own = self.own_flags()
        options = {name: value for name, value in saved.options.items() if name in own}
        options |= {name: getattr(self, name) for name in own if name in self.given}
        mine = {name: getattr(self, name) for name in Study.__struct_fields__ if name != "platform"}
        study = msgspec.convert(options, type(self), dec_hook=lambda of, value: of(value))
        study = replace(study, **mine, platform=saved.platform)
        saved = replace(saved, failures={}, options=options)
        if saved.is_complete:
            return study, saved
        made = saved.circumstances
        require_same_source(folder, made.git_commit, made.git_dirty, begun="begun")
        request = next(iter(saved.cases.values())).request
        if open_corpus(request.experiment).sha256 != request.corpus_sha256:
            raise ExperimentError(f"{folder}: its data has changed since: start a new {saved.study}")
        return study, study.begin(saved)

    @classmethod
    def own_flags(cls) -> list[str]:
        """Names of the flags that a subclass adds."""
        return [name for name in cls.__struct_fields__ if name not in Study.__struct_fields__]

    @property
    def command(self) -> str:
        """Word of the command that makes such a study, and continues it."""
        return type(self).__name__.lower()

    @property
    def source(self) -> str:
        """Folder of the checkpoints to resume from; '' to begin at step 0."""
        return ""

    def resolve(self) -> Experiment:
        """The experiment with the flags and the `fixed` fields in it. Raises ExperimentError.

        After one of nanoGPT's config files, weights to begin with give the model.
        """
        experiment = super().resolve()
        if self.init_from and is_config(self.experiment):
            keep = self.given | sizes_in(Path(self.experiment))
            experiment = with_model_of(self.init_from, experiment, keep=keep)
        for flag, value in self.fixed.items():
            section, _, field = flag.partition(".")
            if value is not None:
                experiment = edited(experiment, {section: {field: value}})
        return experiment

    def cases(self, experiment: Experiment) -> Grid:
        """Cases of the resolved experiment. Raises ExperimentError."""
        raise NotImplementedError

    def begin(self, outcome: Outcome) -> Outcome:
        """The outcome before its first case starts. Raises EnvironmentMissing: this machine is not ready."""
        return outcome

    def launch(self, case: Case, place: Path, **how: Any) -> Record:
        """Run a case in a new folder; `how` are arguments of `execute.launch.launch`. Raises EngineError."""
        return launch(case.request, place, **how)

    def keep(self, case: Case, record: Record, *, first_step_after_s: float) -> Any:
        """The value to keep of a finished case, whose first step ended this long after its start."""
        return figures(record)

    def needs_trace(self, verdict: Verdict) -> bool:
        """Whether the case and its reference run their first step once more, for a trace."""
        return False

    def end(self, outcome: Outcome, folder: Path) -> Outcome:
        """The outcome after its last case; also called after --continue."""
        return outcome

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """Tables and sentences for the terminal, of an outcome with at least one finished case."""
        raise NotImplementedError

    @classmethod
    def page(cls, outcome: Outcome, folder: Path) -> Findings:
        """Tables and figures for the page. Default: `findings`."""
        return cls.findings(outcome, folder)


def show(study: type[Study], outcome: Outcome, folder: Path, *, as_json: bool) -> int:
    """Print the findings of an outcome, and write its page. Returns 0 if complete and passed, else 1."""
    found, page, why = findings_in(study, outcome, folder), None, ""
    try:
        page = write_page_of(study, outcome, folder) if found.tables else None
    except OSError as error:  # a folder of another user, or a full disk
        why = f"no page was written into {folder} ({error.strerror}); the result stands"
    print_findings(replace(found, folder=str(folder), page=str(page or "")), as_json=as_json)
    if page and not as_json:
        results_console().print(f"report: {page}", soft_wrap=True)
    if why:
        errors_console().print(printable(why), style="yellow", soft_wrap=True)
    return 0 if found.passed else 1


def write_page_of(study: type[Study], outcome: Outcome, folder: Path) -> Path:
    """Write the page of an outcome. Returns its path."""
    page = study.page(outcome, folder) if outcome.finished else findings_in(study, outcome, folder)
    return write_page(page_of(outcome.study, folder), page)


def page_of(study: str, folder: Path) -> Path:
    """Path of the page of a study in its folder."""
    return folder / PAGES.get(study, f"{study}.html")


def require_records(outcome: Outcome, folder: Path) -> None:
    """Reject a study that keeps records, and lacks a finished case that was judged. Raises RecordError."""
    for name in outcome.finished if outcome.keeps_records else ():
        require_judged(outcome, name, folder)


def findings_in(study: type[Study], outcome: Outcome, folder: Path) -> Findings:
    """The findings of an outcome, which may have no finished case. Raises EngineError, RecordError."""
    require_records(outcome, folder)
    if outcome.finished:
        return study.findings(outcome, folder)
    return findings_of(outcome, title=outcome.name, sentence="nothing was measured", tables=[], passed=False)
