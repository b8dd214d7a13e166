"""`shardpair matrix`: every engine under every layout against one unsharded device."""

from collections import ChainMap
from collections.abc import Iterable
from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text

from compare.commands.arguments import Spec, StudiedName, chosen_engines
from compare.execute.paths import check_output, create_run_dir
from compare.host.disk import write_atomically
from compare.judge.acceptance import differing_keys
from compare.judge.comparison import COMPARISON, Comparison, read_comparison
from compare.present.parity_page import cell_text, markdown, resident_row
from compare.spec.experiment import Experiment, ExperimentError
from compare.studies.cases import Case
from compare.studies.matrix import LAYOUTS, STUDIES, Cell, fill, matrix_cases, study
from compare.studies.paired_run import LATER_STEP
from compare.studies.presets import PRESETS, check_names
from compare.terminal.console import coloured, print_json, results_console


class Matrix(Spec, frozen=True, kw_only=True):
    """Prove every layout on every engine equal to one device, and print the grid.

    Each cell is trained four times: float64 and float32 with AdamW, float64 with SGD, float64 with dropout.
    Precision, optimizer, dropout and degrees are those of the study and the layout, whatever the experiment
    says. All of it takes most of an hour on two cores; choose a part with --layouts, --engines, --studies,
    and name the same part again beside --continue.

    Try:
      shardpair matrix --layouts fsdp tp --engines jax-manual torch-manual --studies float64
      shardpair matrix --output parity.md
    """

    engines: tuple[StudiedName, ...] = ()
    """Which engines. Default: all."""
    layouts: tuple[str, ...] = ()
    """Which presets. Default: all."""
    studies: tuple[str, ...] = ()
    """Which of float64, float32, "float64, SGD", "float64, dropout". Default: all."""
    output: Path | None = None
    """Also write the grid as Markdown."""
    results: Path | None = None
    """Train nothing: show the grid of a finished matrix again, from the folder that was its --run_dir."""

    def __call__(self, default: Experiment) -> int:
        """Run it. Returns the exit code: 0 if every cell passes that an engine can express, else 1."""
        experiment, engines = self.resolved(is_spread=False), chosen_engines(self.engines)
        layouts, studies = list(self.layouts) or LAYOUTS, list(self.studies) or list(STUDIES)
        check_names("--studies", "study", studies, STUDIES)
        check_output("--output", self.output)
        self.require_nothing_else(default)
        self.refuse_init_from("its studies have precisions of their own, and begin with the seed's weights")
        plans = {name: matrix_cases(study(experiment, name), engines, layouts, self.said) for name in studies}
        _, blank = next(iter(plans.values()))
        if self.dry_run:
            cases = {name: cases for name, (cases, _) in plans.items()}
            return self._show_plan(experiment, cases, blank.values())
        if self.results:
            comparisons = {name: self._finished(self.results / name, plans[name][0]) for name in studies}
        else:
            folder = self._folder()
            comparisons = {
                name: self._trained(folder / name, study(experiment, name), cases)
                for name, (cases, _) in plans.items()
            }
        cells = fill(blank, {name: (plans[name][0], comparisons[name]) for name in studies})
        trained = next(iter(comparisons.values())).experiment.train.max_iters
        steps = min(LATER_STEP, trained)
        if self.output:
            page = markdown(cells, steps=steps, version=_versions(list(comparisons.values())))
            write_atomically(self.output, page.encode())
        print_matrix(cells, studies, steps=steps, as_json=self.json)
        return 0 if all(cell.passed for cell in cells) else 1

    def _show_plan(self, experiment: Experiment, cases: dict[str, list[Case]], cells: Iterable[Cell]) -> int:
        """Every study's cases, and the cells that cannot be."""
        everything = [
            msgspec.structs.replace(case, name=f"{name}: {case.name}")
            for name, of_study in cases.items()
            for case in of_study
        ]
        left_out = {f"{cell.engine}.{cell.layout}": cell.refusal for cell in cells if cell.refusal}
        return self.show_plan(experiment, everything, left_out)

    def _folder(self) -> Path:
        """The folder of all studies: one of its own, so that --continue finds them together."""
        if self.continue_ and not Path(self.continue_).is_dir():
            raise ExperimentError(f"--continue {self.continue_}: there is no such folder")
        return Path(self.continue_) if self.continue_ else create_run_dir("matrix", self.run_dir)

    def _trained(self, folder: Path, experiment: Experiment, cases: list[Case]) -> Comparison:
        return self.compare(
            f"matrix-{folder.name.replace(', ', '-')}", experiment, cases, run_dir=str(folder)
        )[0]

    def _finished(self, folder: Path, cases: list[Case]) -> Comparison:
        """The comparison of a study that was made before, of these very cases as far as they ran."""
        if not (folder / COMPARISON).is_file():
            raise ExperimentError(f"--results {self.results}: it has no {folder.name}/{COMPARISON}")
        comparison = read_comparison(folder)[0]
        for case in cases:
            if request := comparison.requests.get(case.name):
                asked = msgspec.structs.replace(case.experiment, data=request.experiment.data)
                if other := next(differing_keys(request.experiment, asked), ""):
                    raise ExperimentError(f"--results {folder} is of another study: {case.name} has {other}")
        return comparison


def _versions(comparisons: list[Comparison]) -> str:
    """Those of Python and both frameworks, in words."""
    seen = ChainMap(*(versions for comparison in comparisons for versions in comparison.versions))
    return ", ".join(
        f"{package} {seen[package]}" for package in ("python", "jax", "torch") if package in seen
    )


def print_matrix(cells: list[Cell], studies: list[str], *, steps: int, as_json: bool) -> None:
    """The grid on stdout, study by study."""
    if as_json:
        print_json(cells)
        return
    engines = list(dict.fromkeys(cell.engine for cell in cells))
    console = results_console()
    for name in studies:
        table = Table(title=f"{name}: worst gradient error / worst weight error after {steps} steps")
        for column in ("layout", "devices", *engines):
            table.add_column(column, justify="left" if column == "layout" else "right")
        for layout in dict.fromkeys(cell.layout for cell in cells):
            row = [cell for cell in cells if cell.layout == layout]
            table.add_row(layout, str(PRESETS[layout].devices), *(_coloured(cell, name) for cell in row))
        console.print(table)
    console.print(_resident_table(cells))
    for reason in sorted({cell.refusal for cell in cells if cell.refusal}):
        console.print(f"-  {reason}", soft_wrap=True)
    for cell in cells:
        for name, why in cell.failures.items():
            console.print(f"{cell.layout}, {name}: {why}", style="red", soft_wrap=True)
    ran = [cell for cell in cells if not cell.refusal]
    good = sum(cell.passed for cell in ran)
    console.print(f"{good} of {len(ran)} cells pass", style="bold green" if good == len(ran) else "bold red")


def _resident_table(cells: list[Cell]) -> Table:
    """Table of bytes that a device holds between two steps, beside the closed form."""
    engines = list(dict.fromkeys(cell.engine for cell in cells))
    title = "kB at rest: parameters / gradients / optimizer (off the closed form)"
    table = Table(title=title)
    for column in ("layout", "closed form", *engines):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for layout in dict.fromkeys(cell.layout for cell in cells):
        table.add_row(*resident_row([cell for cell in cells if cell.layout == layout]))
    return table


def _coloured(cell: Cell, name: str) -> str | Text:
    if name in cell.failures:
        return coloured("did not finish", "red")
    text = cell_text(cell, name)
    failed = name in cell.verdicts and not cell.verdicts[name].passed
    return coloured(text, "red") if failed else text
