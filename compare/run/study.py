"""A study is data: named cases, what is kept of each, and tables of that. One loop runs every study.

A study is a class in a file of compare/commands. Its docstring is its help and its fields are its flags;
`cases` says what runs, `keep` what is kept of a record, `findings` what that means. The plan of --dry_run,
the folder and its lock, --continue, Ctrl-C, failures, the page and JSON are here. `commands.registry`
names all studies.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec
from msgspec.structs import replace

from compare.contract.record import Record, Step
from compare.execute.folders import create_run_dir, remove_run_dir
from compare.execute.launch import EngineError, launch, prepare
from compare.execute.this_machine import here_and_now, require_same_source
from compare.flags import Spec, checked_pythons, hosts_of
from compare.judge.ladder import objections_by_itself
from compare.judge.metrics import figures
from compare.judge.outcome import Case, Grid, Outcome, judging, read_outcome
from compare.numerics.data import open_corpus
from compare.run.rounds import run_missing
from compare.setup import dry_run
from compare.setup.fitting import require_case, require_sides
from compare.setup.presets import SPREAD
from compare.setup.resuming import require_resumable, resumes
from compare.setup.sources import freeze_weights
from compare.show.figures import Figure
from compare.show.findings import Findings, findings_of
from compare.show.page import write_page
from compare.show.terminal import print_findings
from compare.side.run_lock import lock_folder
from compare.spec.engines.registry import ENGINES
from compare.spec.experiment import Experiment, ExperimentError, edited
from compare.terminal import errors_console, results_console

LATER_STEP = 20
"""After so many steps, or after the last but one, the ladder has weights once more."""
OF_LAYOUTS = dict.fromkeys(f"layout.{field}" for field in SPREAD)
"""For `Study.fixed` of a study that has layouts of its own."""
WITH_CONTINUE = {
    *("continue", "anyway", "quiet", "json", "rows", "fail_on_unexpected", "timeout_s", "cache_dir"),
    *("jax_python", "torch_python", "launcher", "launcher_options", "hosts", "hostfile"),
}
"""Flags that may stand beside --continue: they say where and how engines run, and not what."""
MAX_TIMEOUT_S = 1_000_000.0  # eleven days; poll(2) counts milliseconds in 32 bits


class Study(Spec, frozen=True, kw_only=True):
    """A question about an experiment. A subclass has a docstring of its own."""

    brief: ClassVar[str]
    """A line of `shardpair --help`."""
    group: ClassVar[str] = "Measure"
    """Where it stands there."""
    fixed: ClassVar[Mapping[str, object]] = {}
    """Fields that the study gives, such as `train.max_iters`, and their values; None for computed ones.
    A flag for one is refused."""
    keeps_records: ClassVar[bool] = False
    """The folders of cases stay once their values are kept."""
    needs_reference: ClassVar[bool] = False
    """Nothing else can be held against: cases whose reference failed do not run."""

    def cases(self, experiment: Experiment) -> Grid:
        """What is run of the experiment with the user's overrides. Raises ExperimentError."""
        raise NotImplementedError

    def keep(self, case: Case, record: Record) -> Any:
        """What is kept of a finished case."""
        return figures(record)

    @classmethod
    def findings(cls, outcome: Outcome, folder: Path) -> Findings:
        """What an outcome with at least one finished case says; see `show.findings`."""
        raise NotImplementedError

    def measured(
        self, name: str, case: Case, place: Path, number: int, tell: Callable[[Step], None]
    ) -> tuple[Any, Record | None]:
        """Run a case in a folder: what is kept of it, and its record. Raises EngineError, RecordError."""
        hosts = hosts_of(self)
        record = launch(case.request, place, pythons=checked_pythons(self), hosts=hosts, on_step=tell)
        if not case.against and (wrong := objections_by_itself(record)):
            raise EngineError(f"{name}: FAIL at request: {'; '.join(wrong)}", exit_code=1)
        return self.keep(case, record), record

    def ready(self) -> None:
        """Refuse to begin, or to go on, on a machine that is not ready. Raises EnvironmentMissing."""

    def order(self, outcome: Outcome, number: int) -> list[str]:
        """What a round still lacks, in its order."""
        return outcome.missing(number)

    def before(self, outcome: Outcome, number: int) -> Outcome:
        """The outcome with what is measured before a round."""
        return outcome

    def after(self, outcome: Outcome, folder: Path) -> Outcome:
        """The outcome with what is measured after all cases; called after --continue, too."""
        return outcome

    @classmethod
    def shown(cls, outcome: Outcome, folder: Path, *, as_json: bool) -> int:
        """Print what an outcome says, and leave its page. Returns 0 if it is complete and as it should be."""
        with judging(folder):
            found = findings_in(cls, outcome, folder)
            print_findings(found, as_json=as_json)
            if found.tables:
                page = cls.leave(outcome, folder)
                if not as_json:
                    results_console().print(f"report: {page}", soft_wrap=True)
            return 0 if found.passed else 1

    @classmethod
    def leave(cls, outcome: Outcome, folder: Path) -> Path:
        """Write the page of an outcome. Returns its path."""
        return write_page(folder / f"{outcome.study}.html", findings_in(cls, outcome, folder))

    @classmethod
    def drawn(cls, outcome: Outcome, folder: Path) -> Sequence[Figure]:
        """What `report --picture` saves."""
        return findings_in(cls, outcome, folder).figures

    @property
    def source(self) -> str:
        """Where the checkpoints are that it goes on from; '' to begin at step 0."""
        return ""

    @property
    def title(self) -> str:
        """Name of its folder, and for people: bench-demo."""
        return f"{self.command}-{Path(self.experiment).stem}"

    def asked(self) -> Experiment:
        """The experiment with the overrides and what is `fixed`; its own layout is for `laid_out` to check.

        Raises:
            ExperimentError: for a flag that has no effect.
        """
        for flag in self.fixed:
            if flag in self.given or (flag == "init_from" and self.init_from):
                raise ExperimentError(f"--{flag} has no effect: {self.command} gives it; leave it out")
        experiment = self.resolved()
        for flag, value in self.fixed.items():
            section, _, field = flag.partition(".")
            if value is not None:
                experiment = edited(experiment, {section: {field: value}})
        if "checkpoint.keep" in self.given and not experiment.checkpoint.every:
            raise ExperimentError("--checkpoint.keep has no effect without --checkpoint.every")
        return self.laid_out(experiment)

    def planned(self) -> Outcome:
        """The study before anything starts. Raises ExperimentError for what has no effect, or cannot be."""
        if not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise ExperimentError(
                f"--timeout_s {self.timeout_s} must be more than 0 and at most {MAX_TIMEOUT_S}"
            )
        if Path(self.cache_dir).is_file():
            raise ExperimentError(f"--cache_dir {self.cache_dir} is a file: give a folder")
        experiment = self.asked()
        cases, left_out = self.cases(experiment)
        if not cases and left_out:
            raise ExperimentError(f"nothing is left to run: {'; '.join(dict.fromkeys(left_out.values()))}")
        senders = {ENGINES[case.engine].sends_by for case in cases.values()}
        if "layout.compile" in self.given and senders and "dtensor" not in senders:
            raise ExperimentError("--layout.compile has no effect without torch-compiler in --engines")
        return Outcome(
            study=self.command,
            name=self.title,
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

    @classmethod
    def own_flags(cls) -> list[str]:
        """Names of the flags that say what is measured, beyond the experiment's."""
        return [name for name in cls.__struct_fields__ if name not in Spec.__struct_fields__]

    def __call__(self) -> int:
        """Answer it. Returns 0 if the answer is complete and as it should be, else 1."""
        if self.dry_run:
            if self.continue_:
                raise ExperimentError("--dry_run is for a new run, and --continue goes on with an old one")
            how = {"hosts": hosts_of(self), "init_from": self.init_from, "resume": self.source}
            return dry_run.show(self.planned(), **how, as_json=self.json)
        outcome, folder = self.outcome()
        return self.shown(outcome, folder, as_json=self.json)

    def outcome(self) -> tuple[Outcome, Path]:
        """Measure, from the beginning or what --continue still lacks; nothing is printed on stdout.

        Raises:
            ExperimentError, EnvironmentMissing: before the first process starts.
            EngineError: nothing has finished.
            KeyboardInterrupt: Ctrl-C. The message says what is saved, and how to go on.
        """
        if self.continue_:
            return self._continued(Path(self.continue_))
        planned, pythons = self.planned(), checked_pythons(self)
        for case in planned.cases.values():
            if case.request.profile and hosts_of(self).several:
                raise ExperimentError("a timeline is taken on one host: leave --hosts and --launcher out")
            require_case(case.engine, case.experiment, platform=self.platform, hosts=hosts_of(self))
            require_resumable(case.engine, self.source, self.init_from)
        require_sides([ENGINES[case.engine].side for case in planned.cases.values()], pythons)
        for name, why in planned.left_out.items() if not self.quiet else ():
            errors_console().print(f"{name} is left out: {why}", style="yellow")
        self.ready()
        folder = create_run_dir(planned.name, self.run_dir)
        with lock_folder(folder):
            try:
                begun = replace(self._frozen(planned, folder), circumstances=here_and_now())
            except BaseException:
                remove_run_dir(folder)
                raise
            return run_missing(self, begun, folder), folder

    def _continued(self, folder: Path) -> tuple[Outcome, Path]:
        if others := sorted(self.given - WITH_CONTINUE):  # they would have no effect
            flags = ", ".join(f"--{name}" for name in others)
            raise ExperimentError(
                f"--continue {folder} goes on with what was asked for there: leave out {flags}"
            )
        with lock_folder(folder), judging(folder):
            saved = read_outcome(folder)
            if saved.study != self.command:
                raise ExperimentError(
                    f"--continue {folder}: it is another study: `shardpair {saved.study}` goes on"
                )
            made = saved.circumstances
            if not saved.is_complete:
                require_same_source(folder, made.git_commit, made.git_dirty, begun="begun")
                for request in [case.request for case in saved.cases.values()][:1]:
                    if open_corpus(request.experiment).sha256 != request.corpus_sha256:
                        raise ExperimentError(
                            f"{folder}: its data has changed since; start a new {saved.study}"
                        )
                self.ready()
            return run_missing(self.again(saved), replace(saved, failures={}), folder), folder

    def again(self, outcome: Outcome) -> Self:
        """The study that an outcome is of, with this one's interpreters, hosts and progress."""
        options = {name: value for name, value in outcome.options.items() if name in self.own_flags()}
        study = msgspec.convert(options, type(self), dec_hook=lambda of, value: of(value))
        mine = {name: getattr(self, name) for name in Spec.__struct_fields__ if name != "platform"}
        return replace(study, **mine, platform=outcome.platform)

    def _frozen(self, planned: Outcome, folder: Path) -> Outcome:
        """The plan with requests that any process in any place understands: data, weights, checkpoints."""
        if not planned.cases:
            return planned
        data, corpus_sha256 = prepare(planned.experiment, folder)
        pythons = checked_pythons(self)
        init = freeze_weights(self.init_from, planned.experiment, folder, pythons=pythons)
        resumed = resumes(self.source, planned.cases, planned.experiment, corpus_sha256)
        cases = {}
        for name, case in planned.cases.items():
            request, resume = case.request, resumed.get(name, msgspec.UNSET)
            steps = case.experiment.train.max_iters - (resume.step if resume else 0)
            later = request.later_step
            request = replace(
                request,
                experiment=replace(case.experiment, data=data),
                platform=self.platform,
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


def findings_in(study: type[Study], outcome: Outcome, folder: Path) -> Findings:
    """What an outcome says, even if it is that nothing was measured. Raises EngineError, RecordError."""
    if outcome.finished or not outcome.cases:
        return study.findings(outcome, folder)
    return findings_of(outcome, title=outcome.name, sentence="nothing was measured", tables=[], passed=False)
