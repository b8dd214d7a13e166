"""`shardpair lesson`: one strategy in every engine on one page, with what a real run of it sent."""

import os
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec
import tyro

from compare.execute.paths import check_output
from compare.flags import SidePythons, defaults_for
from compare.judge.outcome import Outcome
from compare.spec.experiment import Experiment, ExperimentError, load
from compare.studies.lessons import EXPERIMENT, LESSONS
from compare.studies.run import Run
from compare.terminal import print_json, results_console

if TYPE_CHECKING:
    StrategyName = str
else:
    StrategyName = Literal[tuple(LESSONS)]


class LessonRun(Run, frozen=True, kw_only=True):
    """A run with the timeline of one step; `shardpair run --continue` goes on with it."""

    asks: ClassVar = {"profile": True}

    @property
    def command(self) -> str:
        """What it makes is a run."""
        return "run"


class ReadLesson(SidePythons, frozen=True, kw_only=True):
    """Read one strategy in every engine, side by side, beside what XLA made of it and what each sent.

    Trains the experiment `check` (float64, small, half a minute) with all engines under the strategy's
    layout, and writes one HTML page that needs no network: who holds what, each collective on a ring, the
    source files with links between lines and the rows of the ledger that they cause, memory, and three
    experiments to try. Exit code 1 if the engines do not agree.

    Try:
      shardpair lesson fully_sharded
      shardpair lesson tensor_parallel --output tensor_parallel.html
      shardpair lesson data_parallel --results runs/demo-20260101-120000    (of a run that was made before)
    """

    strategy: Annotated[StrategyName, tyro.conf.Positional]
    """The row of the grid."""
    output: Path | None = None
    """Where the page is written. Default: lesson.html in the folder of the run."""
    results: Path | None = None
    """Train nothing: build the page from a finished run of any experiment whose layout has the strategy."""
    run_dir: str = ""
    """Folder of the run; must not exist. Default: runs/lesson-STRATEGY-TIME."""
    open: bool = True
    """Open the page in a browser, if there is one and a terminal asks; --no_open does not."""
    timeout_s: float = 600.0
    """An engine that hangs for this long is ended."""
    quiet: bool = False
    """No progress on stderr."""
    json: bool = False
    """Print the outcome as one JSON object on stdout instead of a line for people; opens nothing."""

    def __call__(self, default: Experiment) -> int:
        """Make the page. Returns 0 if the engines of its run agree, else 1."""
        from compare.present.lesson.page import write_lesson  # draws: a second to import

        check_output("--output", self.output, kinds=(".html",))
        if self.results and self.run_dir:
            raise ExperimentError(
                f"--run_dir {self.run_dir} has no effect: --results {self.results} is a run already"
            )
        folder = self.results or self._trained()
        page = self.output or folder / "lesson.html"
        comparison = write_lesson(self.strategy, folder, page)
        self._show(comparison, page, folder)
        return 0 if comparison.passed else 1

    def _trained(self) -> Path:
        """Train the lesson's run. Returns its folder."""
        lesson = LESSONS[self.strategy]
        command = msgspec.structs.replace(
            defaults_for(LessonRun, EXPERIMENT),
            preset=lesson.preset,
            devices=lesson.devices,
            keep_tensors=True,
            run_dir=self.run_dir,
            timeout_s=self.timeout_s,
            cache_dir="",  # a program that was compiled from an older source has its lines
            quiet=self.quiet,
            jax_python=self.jax_python,
            torch_python=self.torch_python,
        )
        return command.outcome(load(EXPERIMENT))[1]

    def _show(self, comparison: Outcome, page: Path, folder: Path) -> None:
        if self.json:
            print_json(
                {
                    "strategy": self.strategy,
                    "page": str(page),
                    "run_dir": str(folder),
                    "engines": comparison.finished,
                    "passed": comparison.passed,
                    "verdict": comparison.sentence(),
                }
            )
            return
        console = results_console()
        console.print(
            comparison.sentence(), style="bold green" if comparison.passed else "bold red", soft_wrap=True
        )
        console.print(f"lesson: {page}", soft_wrap=True)
        if self.open and sys.stdout.isatty() and has_browser():
            webbrowser.open(page.absolute().as_uri())


def has_browser() -> bool:
    """True if a window can be opened: a browser in the terminal would take that over."""
    graphical = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return graphical or sys.platform in ("darwin", "win32")
