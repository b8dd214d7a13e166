"""`shardpair buckets`: what gradient buckets cost on this machine, and what a closed form predicts."""

from pathlib import Path

import msgspec

from compare.commands.arguments import Spec
from compare.commands.pages import leave_page
from compare.contract.timing import Timing
from compare.execute.launch import EngineError
from compare.execute.paths import PICTURES, check_output
from compare.execute.progress import Reporter
from compare.judge.bench import BenchResult, read_bench
from compare.judge.bench_agreement import mistakes
from compare.judge.bucket_study import ALONE, save, study_of
from compare.judge.collective_fit import Fit
from compare.present.buckets import print_study
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.bench import BenchInterrupted, continue_bench, run_bench
from compare.studies.buckets import fitted_all_reduce, plan_study
from compare.studies.cases import Case
from compare.studies.paired_run import Interrupted

ROUNDS = 5
STANDARD = Timing()


class Buckets(Spec, frozen=True, kw_only=True):
    """Time data parallelism over bucket sizes, and hold the best one against a closed form.

    torch-manual's step with its gradients flat, naive, overlapped and in buckets, each in fresh processes, in
    rounds whose order rotates; less the step of one rank on the same tokens without communication. Beside it
    overhead(n) = s/(n w) + n o, with w and o from an all-reduce that is timed in the same run.

    Try:
      shardpair buckets demo --rounds 2
      shardpair buckets baby-gpt --train.batch_size 4 --bucket_mb 1 2.5 5 10 25
    """

    bucket_mb: tuple[float, ...] = ()
    """Bucket sizes in MB (1e6 bytes). Default: round numbers of which the gradients fill 2 to 50, but none
    that makes the same buckets as another."""
    devices: int = 2
    """Ranks of data parallelism."""
    rounds: int = ROUNDS
    """How often each case is timed. From fewer than five rounds no interval can be told."""
    window: int = STANDARD.window
    """Steps of a window, inside of which nothing waits for the devices."""
    windows: int = STANDARD.windows
    """Windows of a process."""
    anyway: bool = False
    """Time on a busy machine, too; the record then says so."""
    picture: Path | None = None
    """Also save the picture (.png, .svg, .pdf)."""

    def __call__(self, default: Experiment) -> int:
        """Time them. Returns as `show`."""
        check_output("--picture", self.picture, kinds=PICTURES)
        if self.dry_run:
            planned = self._planned(default)
            cases = [Case(name=c.name, engine=c.engine, experiment=c.experiment) for c in planned.cases]
            return self.show_plan(planned.experiment, cases)
        result, folder = self._result(default)
        settings = msgspec.structs.replace(self.settings(), platform=result.platform)
        fit = fitted_all_reduce(folder, result, settings=settings, quiet=self.quiet)
        return show(result, fit, folder, picture=self.picture, as_json=self.json)

    def _result(self, default: Experiment) -> tuple[BenchResult, Path]:
        """Time the steps, from the beginning or what --continue still lacks."""
        settings, reporter = self.settings(), Reporter(quiet=self.quiet)
        try:
            if self.continue_:
                self._require_only_continue(default)
                folder = Path(self.continue_)
                _require_study(folder)
                result = continue_bench(folder, anyway=self.anyway, settings=settings, reporter=reporter)
                return result, folder
            planned = self._planned(default)
            return run_bench(planned, run_dir=self.run_dir, settings=settings, reporter=reporter)
        except BenchInterrupted as interrupt:
            kept = read_bench(interrupt.folder)
            raise Interrupted(
                f"interrupted; every process was ended. Kept: {kept.finished_rounds} of {kept.rounds} "
                f"rounds. `shardpair buckets --continue {interrupt.folder}` runs the rest"
            ) from None

    def _planned(self, default: Experiment) -> BenchResult:
        """The cases. Raises ExperimentError for what has no effect, or cannot be."""
        self.refuse_init_from("the time of a step does not depend on the weights")
        self.refuse_layout("the study has layouts of its own, on --devices")
        for flag, value, instead in (
            ("train.max_iters", self.train.max_iters, "--window and --windows"),
            ("layout.bucket_mb", self.layout.bucket_mb, "--bucket_mb"),
        ):
            if flag in self.given:
                raise ExperimentError(f"--{flag} {value} has no effect: it follows from {instead}")
        return plan_study(
            f"buckets-{Path(self.experiment).stem}",
            self.resolved(is_spread=False),
            devices=self.devices,
            bucket_mb=self.bucket_mb,
            timing=Timing(window=self.window, windows=self.windows),
            rounds=self.rounds,
            anyway=self.anyway,
            settings=self.settings(),
        )

    def _require_only_continue(self, default: Experiment) -> None:
        """Refuse what --continue would ignore."""
        self.require_nothing_else(
            default,
            bucket_mb=self.bucket_mb,
            devices="devices" in self.given,
            rounds="rounds" in self.given,
            window="window" in self.given,
            windows="windows" in self.given,
        )


def show(result: BenchResult, fit: Fit, folder: Path, *, picture: Path | None, as_json: bool) -> int:
    """Put bench and fit together, write the study and its page, and print it.

    Returns:
        0 if every case finished, did the same work, and stated the time that it took; else 1.

    Raises:
        EngineError: fewer than two cases finished once: there is no overhead to tell.
    """
    if len({one.case for one in result.measurements}) < 2:
        raise EngineError("; ".join(one.why for one in result.failures), exit_code=1)
    study = study_of(result, fit)
    save(study, folder)
    print_study(result, study, as_json=as_json)

    def draw() -> Path:
        from compare.present.report.buckets import save_picture, write_page

        if picture:
            save_picture(picture, study)
        return write_page(folder, result, study)

    leave_page(draw, label="results", as_json=as_json)
    return 1 if result.failures or mistakes(result) else 0


def _require_study(folder: Path) -> None:
    """Refuse the folder of another bench. Raises ExperimentError."""
    if not any(case.variant == ALONE for case in read_bench(folder).cases):
        raise ExperimentError(
            f"--continue {folder}: it is a bench, not a bucket study: `shardpair bench` goes on"
        )
