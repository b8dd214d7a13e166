"""`shardpair lesson`: one strategy in every engine on one page, with what a real run of it sent."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import tyro

from compare.commands.ledger.chips import Program, compile_all
from compare.commands.run import Run
from compare.execute.cpu_load import warn_of_load
from compare.execute.folders import check_output, default_cache
from compare.flags import AsJson, SidePythons, defaults_for, find_pythons
from compare.judge.outcome import read_outcome, read_run
from compare.setup.chips import chip_of, devices_of
from compare.setup.lessons import FOLDERS, LESSONS
from compare.setup.presets import spread
from compare.show.terminal import print_findings
from compare.spec.engines.registry import JAX
from compare.spec.experiment import Experiment, edited
from compare.system.tensors import RecordError
from compare.terminal import errors_console, results_console

if TYPE_CHECKING:
    StrategyName = str
else:
    StrategyName = Literal[tuple(LESSONS)]


class ReadLesson(SidePythons, frozen=True, kw_only=True):
    """Read one strategy in every engine on one page, with the messages that each engine sent.

    Trains `check` or `experts` (float64, two minutes of CPU time) with all engines under the strategy's
    layout, and writes one HTML page that needs no network. It shows who holds what, each collective on a
    ring, every source file of the strategy with links from lines to the rows of the ledger that they cause,
    the timeline of a step, and memory. The exit code is 1 if the engines do not agree.

    Try:
      shardpair lesson fully_sharded
      shardpair lesson tensor_parallel --output tensor_parallel.html
      shardpair lesson fully_sharded --chip v5e:2x4          (and what XLA sends on TPUs that are not here)
      shardpair lesson data_parallel --results runs/demo-20260101-120000    (of a run that was made before)
    """

    strategy: Annotated[StrategyName, tyro.conf.Positional]
    """Strategy of the lesson."""
    output: Path | None = None
    """File of the page. Default: lesson.html in the folder of the run."""
    results: Path | None = None
    """Train nothing: write the page from a finished run whose layout has the strategy."""
    chip: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Chip that need not be here, as of `shardpair ledger --chip`: a column for each JAX engine. The strategy
    has all devices of the chip. A TPU or a GPU computes in bfloat16 instead of float64."""
    cache_dir: str = default_cache()
    """Folder of programs compiled for --chip; '' for none."""
    timeout_s: float = 600.0
    """Seconds without progress after which an engine is ended."""
    quiet: bool = False
    """Print no progress on stderr."""
    json: AsJson = False

    def __call__(self) -> int:
        """Make the page. Returns 0 if the engines of its run agree, else 1."""
        from compare.commands.lesson.page import (
            write_lesson,
        )  # imports pygments, which other commands do not need

        check_output("--output", self.output, kinds=(".html",))
        lesson = LESSONS[self.strategy]
        run = msgspec.structs.replace(
            defaults_for(Run, lesson.experiment),
            preset=lesson.preset,
            devices=lesson.devices,
            keep_tensors=True,
            profile=True,
            timeout_s=self.timeout_s,
            cache_dir="",  # a program that was compiled from an older source has its lines
            quiet=self.quiet,
            jax_python=self.jax_python,
            torch_python=self.torch_python,
        )
        experiment = read_outcome(self.results).experiment if self.results else run.resolve()
        programs = self.on_chips(experiment)
        folder = self.results or run.run()[1]
        page = self.output or folder / "lesson.html"
        outcome, of_cases = read_run(folder)
        of_engines = {record.manifest.engine: record for record in reversed(of_cases.values())}
        records = {engine: of_engines[engine] for engine in FOLDERS if engine in of_engines}
        if not records:
            raise RecordError(f"{folder} has no record of {', '.join(FOLDERS)}: a lesson is made from theirs")
        found = write_lesson(self.strategy, outcome, records, page, programs)
        passed, sentence = outcome.passed, outcome.sentence()
        if self.json:
            found = msgspec.structs.replace(found, sentence=sentence, folder=str(folder))
            print_findings(found, as_json=True)
        else:
            console = results_console()
            for line in warn_of_load(outcome):
                errors_console().print(line, style="red", soft_wrap=True)
            console.print(sentence, style="bold green" if passed else "bold red", soft_wrap=True)
            console.print(f"lesson: {page}", soft_wrap=True)
        return 0 if passed else 1

    def on_chips(self, experiment: Experiment) -> list[Program]:
        """The strategy's step of each JAX engine, compiled for the chips. Raises as `compile_all`."""
        programs = []
        for chip in map(chip_of, self.chip):
            spec = experiment
            if chip.compiler != "cpu" and experiment.precision.dtype == "float64":
                spec = edited(experiment, {"precision": {"dtype": "bfloat16"}})
            lesson = LESSONS[self.strategy]
            spec = spread(spec, lesson.preset, devices_of(chip) or experiment.layout.devices)
            engines = [engine.name for engine in JAX.engines if not engine.why_not(spec.layout)]
            programs += compile_all(
                {engine: (engine, spec) for engine in engines},
                [chip],
                python=find_pythons(self)[JAX.name],
                cache_dir=self.cache_dir,
                tell=(lambda _: None) if self.quiet else errors_console().print,
            ).programs
        return programs
