"""`shardpair bench`: which engine is faster on this machine, by how much, and how surely."""

from functools import partial
from pathlib import Path

from compare.commands.arguments import EngineName, Spec
from compare.commands.chosen_layout import DEVICES
from compare.commands.pages import leave_page
from compare.commands.pythons import pythons_of
from compare.contract.timing import Timing
from compare.execute.progress import Reporter
from compare.judge.bench import BenchResult, read_bench
from compare.judge.bench_agreement import mistakes
from compare.present.bench_tables import print_bench
from compare.spec.engines.registry import STUDIED
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.bench import BenchInterrupted, continue_bench, plan_bench, run_bench
from compare.studies.bench_cases import Choice
from compare.studies.cases import Case
from compare.studies.fitting import installed
from compare.terminal.console import errors_console

ROUNDS = 5
STANDARD = Timing()


class Bench(Spec, frozen=True, kw_only=True):
    """Time engines, layouts, sizes and settings against each other, and say how sure the ratios are.

    Each case is a fresh process, or the ranks that it starts; all of them run in rounds, whose order rotates.
    Steps run in windows: nothing waits for a step inside of one. A ratio is taken within a round; the median
    over rounds has an interval from five rounds on. Loss and gradient norm of every step are held against the
    first case's; `shardpair check` proves more. On a busy machine it refuses to begin.

    Try:
      shardpair bench demo --rounds 2
      shardpair bench cpu --presets ddp zero1 fsdp --devices 2 --baseline torch-library
      shardpair bench demo --engines torch-manual torch-manual
      shardpair bench cpu --engines torch-manual --presets ddp --devices 2 --variants layout.bucket_mb=1
      shardpair bench cpu --presets single ddp --devices 4 --baseline jax-compiler.single
    """

    engines: tuple[EngineName, ...] = ()
    """Which engines. Default: all four. One that is named twice is held against itself. A peer
    (`shardpair list`) runs if it is named, and is left out, with the line that installs it, where missing."""
    presets: tuple[str, ...] = ()
    """Layouts by name (`shardpair list`), a block of the table each. Default: the experiment's own layout."""
    devices: tuple[int, ...] = ()
    """How many devices each preset spreads over, one number or several. Default: 4."""
    sizes: tuple[str, ...] = ()
    """Sizes of the work, a block of the table each: fields of the experiment, such as train.batch_size=8 or
    model.n_layer=12,model.n_embd=768."""
    variants: tuple[str, ...] = ()
    """Settings for the same work, a row beside each engine's own: such as layout.bucket_mb=1 or
    layout.remat=full."""
    baseline: str = ""
    """What the others are divided by: an engine, in each block its own case; or ENGINE.LAYOUT, such as
    jax-compiler.single, one case for all blocks of its size. Default: torch-manual, or the first engine."""
    rounds: int = ROUNDS
    """How often each case is timed. From fewer than five rounds no interval can be told."""
    window: int = STANDARD.window
    """Steps of a window, inside of which nothing waits for the devices."""
    windows: int = STANDARD.windows
    """Windows of a process."""
    anyway: bool = False
    """Time on a busy machine, too; the record then says so."""
    cache_dir: str = ""
    """Keep compiled programs here between processes, to save time. Default: compile anew, and time it."""

    def __call__(self, default: Experiment) -> int:
        """Time them. Returns 0 if every case finished and did the same work, else 1."""
        if self.dry_run:
            planned = self._planned(default)
            cases = [
                Case(name=case.name, engine=case.engine, experiment=case.experiment) for case in planned.cases
            ]
            return self.show_plan(planned.experiment, cases, planned.left_out)
        try:
            result, folder = self.outcome(default)
        except BenchInterrupted as interrupt:
            show(read_bench(interrupt.folder), interrupt.folder, as_json=self.json)
            raise
        return show(result, folder, as_json=self.json)

    def outcome(self, default: Experiment) -> tuple[BenchResult, Path]:
        """Measure, from the beginning or what --continue still lacks; nothing is printed on stdout."""
        settings, reporter = self.settings(), Reporter(quiet=self.quiet)
        if self.continue_:
            self._require_only_continue(default)
            folder = Path(self.continue_)
            return continue_bench(folder, anyway=self.anyway, settings=settings, reporter=reporter), folder
        planned = self._planned(default)
        if not self.quiet:
            for name, why in planned.left_out.items():
                errors_console().print(f"{name} is left out: {why}", style="yellow")
        return run_bench(planned, run_dir=self.run_dir, settings=settings, reporter=reporter)

    def _planned(self, default: Experiment) -> BenchResult:
        """The cases. Raises ExperimentError for what has no effect, or cannot be."""
        self.refuse_init_from("the time of a step does not depend on the weights")
        if self.devices and not self.presets:
            raise ExperimentError(
                f"--devices {self.devices[0]} without --presets has no effect: say how they are used, with "
                f"--presets or with the layout's degrees, such as --layout.dp_replicate {self.devices[0]}"
            )
        if "train.max_iters" in self.given:
            raise ExperimentError(
                f"--train.max_iters {self.train.max_iters} has no effect: the steps of a bench are those of "
                f"--window and --windows"
            )
        able, missing = installed(self.engines or tuple(STUDIED), pythons_of(self))
        return plan_bench(
            f"bench-{Path(self.experiment).stem}",
            self.resolved(is_spread=not self.presets),
            Choice(
                engines=tuple(able),
                presets=self.presets,
                devices=self.devices or (DEVICES,),
                sizes=self.sizes,
                variants=self.variants,
                said=self.said,
            ),
            timing=Timing(window=self.window, windows=self.windows),
            rounds=self.rounds,
            baseline=self.baseline,
            anyway=self.anyway,
            settings=self.settings(),
            left_out=missing,
        )

    def _require_only_continue(self, default: Experiment) -> None:
        """Refuse what --continue would ignore."""
        self.require_nothing_else(
            default,
            engines=self.engines,
            presets=self.presets,
            devices=self.devices,
            sizes=self.sizes,
            variants=self.variants,
            baseline=self.baseline,
            rounds="rounds" in self.given,
            window="window" in self.given,
            windows="windows" in self.given,
        )


def _page(result: BenchResult, folder: Path) -> Path:
    from compare.present.report.bench_page import write_bench_page  # draws: 2 s to import

    return write_bench_page(result, folder)


def show(result: BenchResult, folder: Path, *, as_json: bool) -> int:
    """Print it and leave its page.

    Returns:
        0 if every case finished, did the same work, and stated the time that it took; else 1.
    """
    print_bench(result, as_json=as_json)
    if result.measurements:
        leave_page(partial(_page, result, folder), label="page", as_json=as_json)
    return 1 if result.failures or mistakes(result) else 0
