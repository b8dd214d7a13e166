"""`shardpair matrix`: every engine under every layout against one unsharded device."""

from pathlib import Path
from typing import ClassVar

import msgspec

from compare.contract.run_lock import lock_folder
from compare.execute.here import here_and_now
from compare.execute.paths import check_output, create_run_dir
from compare.flags.arguments import StudiedName, chosen_engines
from compare.host.disk import write_atomically
from compare.judge.acceptance import differing_keys
from compare.judge.circumstances import Circumstances
from compare.judge.comparison import COMPARISON, Comparison, differences, read_comparison, read_saved
from compare.judge.outcome import read_outcome, save
from compare.present.parity_page import cell_text, markdown, resident_row
from compare.show.findings import Findings, Row, Table, Text
from compare.spec.experiment import Experiment, ExperimentError, to_toml
from compare.studies.cases import Case
from compare.studies.matrix_cells import LAYOUTS, STUDIES, Cell, MatrixOutcome, study
from compare.studies.presets import PRESETS, check_names
from compare.study import Study


class Matrix(Study[MatrixOutcome], frozen=True, kw_only=True):
    """Prove every layout on every engine equal to one device, and print the grid.

    Each cell is trained four times: float64 and float32 with AdamW, float64 with SGD, float64 with dropout.
    Precision, optimizer, dropout and degrees are those of the study and the layout, whatever the experiment
    says. All of it takes most of an hour on two cores; choose a part with --layouts, --engines, --studies.

    Try:
      shardpair matrix --layouts fsdp tp --engines jax-manual torch-manual --studies float64
      shardpair matrix --output parity.md
    """

    engines: tuple[StudiedName, ...] = ()
    """Which engines. Default: all of the grid."""
    layouts: tuple[str, ...] = ()
    """Which presets. Default: all."""
    studies: tuple[str, ...] = ()
    """Which of float64, float32, "float64, SGD", "float64, dropout". Default: all."""
    output: Path | None = None
    """Also write the grid as Markdown."""
    results: Path | None = None
    """Train nothing: show the grid of a finished matrix again, from the folder that was its --run_dir."""

    brief = "every layout on every engine against one device, as a grid"
    group = "Prove"
    default = "check"
    own_weights = "its studies have precisions of their own, and begin with the seed's weights"
    kept: ClassVar = MatrixOutcome
    shows_unfinished = False
    alters_nothing: ClassVar = frozenset({"output", "results"})

    @property
    def gives_layouts(self) -> bool:
        """True: --layouts."""
        return True

    def planned(self, default: Experiment) -> MatrixOutcome:
        """The part of the grid that is asked for. Raises ExperimentError."""
        check_output("--output", self.output)
        check_names("--studies", "study", self.studies, STUDIES)
        planned = MatrixOutcome(
            study=self.command,
            name="matrix",
            experiment=self.asked(),
            platform=self.platform,
            circumstances=Circumstances(),
            engines=chosen_engines(self.engines),
            layouts=list(self.layouts) or LAYOUTS,
            studies=list(self.studies) or list(STUDIES),
            said=self.said,
        )
        _, cells = next(iter(planned.planned().values()))
        refused = {f"{one.engine}.{one.layout}": one.refusal for one in cells.values() if one.refusal}
        return msgspec.structs.replace(planned, left_out=refused)

    def cases_of(self, planned: MatrixOutcome) -> list[Case]:
        """Every study's cases."""
        return [
            msgspec.structs.replace(case, name=f"{name}: {case.name}")
            for name, (cases, _) in planned.planned().items()
            for case in cases
        ]

    def outcome(self, default: Experiment) -> tuple[MatrixOutcome, Path]:
        """Train what is missing; or, with --results, read what was trained."""
        if not self.results:
            return super().outcome(default)
        asked = self.planned(default)
        found = {name: _finished(self.results / name, cases) for name, (cases, _) in asked.planned().items()}
        return asked.filled(found), self.results

    def begun(self, planned: MatrixOutcome) -> tuple[MatrixOutcome, Path]:
        """Train every study, in a new folder."""
        folder = create_run_dir("matrix", self.run_dir)
        begun = msgspec.structs.replace(planned, circumstances=here_and_now())
        return self._trained(begun, folder), folder

    def continued(self, folder: Path) -> MatrixOutcome:
        """Train what is missing."""
        return self._trained(read_outcome(folder, MatrixOutcome), folder)

    def _trained(self, planned: MatrixOutcome, folder: Path) -> MatrixOutcome:
        settings = msgspec.structs.replace(self.settings(), platform=planned.platform)
        with lock_folder(folder):
            save(planned, folder)  # for --continue, whatever ends it
            comparisons = {
                name: self.compare(
                    f"matrix-{name.replace(', ', '-')}",
                    study(planned.experiment, name),
                    cases,
                    run_dir=str(folder / name),
                    settings=settings,
                )[0]
                for name, (cases, _) in planned.planned().items()
            }
            done = planned.filled(comparisons)
            save(done, folder)
        return done

    @classmethod
    def judged_again(cls, outcome: MatrixOutcome, folder: Path) -> tuple[MatrixOutcome, list[str]]:
        """Every study as its records give it now."""
        begun = [name for name in outcome.studies if (folder / name / COMPARISON).is_file()]
        anew = {name: read_comparison(folder / name)[0] for name in begun}
        moved = [line for name in begun for line in differences(read_saved(folder / name), anew[name])]
        return outcome.filled(anew), moved

    def show(self, outcome: MatrixOutcome, folder: Path) -> int:
        """Print the grid; write it as Markdown where that was asked for."""
        if self.output:
            version = ", ".join(f"{package} {version}" for package, version in outcome.versions.items())
            page = markdown(outcome.cells, steps=outcome.steps, version=version)
            write_atomically(self.output, page.encode())
        return super().show(outcome, folder)

    @classmethod
    def findings(cls, outcome: MatrixOutcome, folder: Path) -> Findings:
        """A grid for each study, and what devices hold between two steps."""
        cells = outcome.cells
        failed = {f"{one.layout}, {name}": why for one in cells for name, why in one.failures.items()}
        return Findings(
            title="Every engine under every layout, against one unsharded device",
            sentence=outcome.sentence(),
            value=cells,
            passed=len(outcome.good) == len(outcome.ran),
            tables=[*(_grid(outcome, name) for name in outcome.studies), _resident(outcome)],
            missing=failed,
            left_out=outcome.left_out,
            spec=to_toml(outcome.experiment),
            source=outcome.circumstances.words,
        )


def _finished(folder: Path, cases: list[Case]) -> Comparison:
    """The comparison of a study that was made before, of these very cases as far as they ran."""
    if not (folder / COMPARISON).is_file():
        raise ExperimentError(f"--results {folder.parent}: it has no {folder.name}/{COMPARISON}")
    comparison = read_comparison(folder)[0]
    for case in cases:
        if request := comparison.requests.get(case.name):
            asked = msgspec.structs.replace(case.experiment, data=request.experiment.data)
            if other := next(differing_keys(request.experiment, asked), ""):
                raise ExperimentError(f"--results {folder} is of another study: {case.name} has {other}")
    return comparison


def _grid(outcome: MatrixOutcome, name: str) -> Table:
    rows = []
    for layout, cells in _by_layout(outcome).items():
        texts = [Text(cell_text(cell, name), news="fail" if _is_bad(cell, name) else "") for cell in cells]
        rows.append(Row(Text(layout), [Text(str(PRESETS[layout].devices)), *texts]))
    return Table(
        name=f"{name}: worst gradient error / worst weight error after {outcome.steps} steps",
        corner="layout",
        columns=["devices", *outcome.engines],
        rows=rows,
    )


def _is_bad(cell: Cell, name: str) -> bool:
    return name in cell.failures or (name in cell.verdicts and not cell.verdicts[name].passed)


def _resident(outcome: MatrixOutcome) -> Table:
    """Bytes that a device holds between two steps, beside the closed form."""
    rows = [resident_row(cells) for cells in _by_layout(outcome).values()]
    return Table(
        name="kB at rest: parameters / gradients / optimizer (off the closed form)",
        corner="layout",
        columns=["closed form", *outcome.engines],
        rows=[Row(Text(layout), list(map(Text, texts))) for layout, *texts in rows],
    )


def _by_layout(outcome: MatrixOutcome) -> dict[str, list[Cell]]:
    return {layout: [cell for cell in outcome.cells if cell.layout == layout] for layout in outcome.layouts}
