"""Results of the Python API: arrays, tables and figures."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from compare.commands.diff.difference import Difference
from compare.commands.registry import STUDIES
from compare.contract.record import MANIFEST, Manifest, Record, read_record, read_tensors
from compare.contract.request import Rung
from compare.judge.outcome import Outcome
from compare.run.study import findings_in, page_of
from compare.show.figures import Figure
from compare.show.findings import Findings
from compare.show.page import fragment
from compare.spec.names import did_you_mean

CURVES = ("loss", "grad_norm", "lr", "step_time_ms")


class Training(Struct, frozen=True, kw_only=True, eq=False):
    """A finished run of one engine: its steps as arrays, its tensors by name."""

    name: str
    record: Record
    step: np.ndarray
    """Number of each step, from 0, int64 (steps,)."""
    loss: np.ndarray
    """Mean cross-entropy in nats before each step's update, float64 (steps,), like the other curves."""
    grad_norm: np.ndarray
    """Global norm of the gradients before clipping."""
    lr: np.ndarray
    """Learning rate of each step."""
    step_time_ms: np.ndarray
    """Wall time of each step."""
    evaluated_after: np.ndarray
    """Number of finished steps at each evaluation, int64 (evaluations,)."""
    train_loss: np.ndarray
    """Loss over training batches at each evaluation, in nats, float64 (evaluations,)."""
    validation_loss: np.ndarray
    """Loss over validation batches at each evaluation, in nats, float64 (evaluations,)."""

    @property
    def manifest(self) -> Manifest:
        """Versions, devices, memory and times of the run."""
        return self.record.manifest

    def tensors(self, rung: str) -> Mapping[str, np.ndarray]:
        """Tensors of a rung of the ladder, such as gradients or later_weights, by canonical name.

        Raises:
            ValueError: no such rung, or the run did not record it.
        """
        if rung not in list(Rung):
            names = did_you_mean(rung, Rung) or f" (there are {', '.join(Rung)})"
            raise ValueError(f"{rung}: no such rung{names}")
        if tensors := read_tensors(self.record.folder, Rung(rung)):
            return tensors
        raise ValueError(f"{self.name} has no {rung}: run with ladder=True and keep_tensors=True")


class Output(Struct, frozen=True, kw_only=True, eq=False):
    """Output of a command. A notebook shows its tables."""

    findings: Findings
    """Sentences and tables."""

    @property
    def passed(self) -> bool:
        """Whether every case finished and passed; of a dry run, whether nothing is refused."""
        return self.findings.passed

    def sentence(self) -> str:
        """The result in one line."""
        return self.findings.sentence

    def to_dict(self) -> dict[str, Any]:
        """The object that --json prints, with None for numbers that are not finite."""
        return msgspec.json.decode(msgspec.json.encode(self.findings.envelope))

    def __repr__(self) -> str:
        """The command and the sentence, for a terminal."""
        return f"<{type(self).__name__} {self.findings.study}: {self.sentence()}>"

    def _repr_html_(self) -> str:
        """The sentence and the tables, for a notebook."""
        return fragment(self.findings)


class Comparison(Output, frozen=True, kw_only=True, eq=False):
    """Comparison of two finished runs."""

    differences: dict[str, Difference]
    """Settings, errors by rung and costs, by case."""


class Result(Output, frozen=True, kw_only=True, eq=False):
    """The result of a study. `result["jax-manual"]` is one engine's run."""

    outcome: Outcome
    """Values, verdicts with the error on every rung, failures."""
    folder: Path
    """Folder of outcome.json, for `read`."""
    trainings: dict[str, Training]
    """Finished runs whose records were kept, by case."""

    @property
    def report(self) -> Path | None:
        """The HTML page; None if it was not written."""
        return Path(self.findings.page) if self.findings.page else None

    @property
    def figures(self) -> list[Figure]:
        """Loss curves and the other figures of the page, which a notebook draws."""
        if not self.outcome.finished:
            return []
        page = STUDIES[self.outcome.study].page(self.outcome, self.folder)
        return [*page.figures, *page.more_figures]

    def figure(self, title: str = "") -> Figure:
        """The first figure with these words in its title. `figure().save(path)` writes a file.

        Raises ValueError: there is none.
        """
        figures = self.figures
        for figure in figures:
            if title.casefold() in figure.title.casefold():
                return figure
        titles = f" (there are {', '.join(figure.title for figure in figures)})" if figures else ""
        raise ValueError(f"a {self.outcome.study} has no figure {title}".rstrip() + titles)

    def errors(self) -> dict[str, dict[str, float]]:
        """Relative errors of every compared case on every rung: errors()[case][rung]."""
        verdicts = self.outcome.verdicts
        return {of.candidate: {result.rung: result.error for result in of.rungs} for of in verdicts}

    def __getitem__(self, name: str) -> Training:
        """The run of a case."""
        return self.trainings[name]

    def __iter__(self) -> Iterator[Training]:
        """Finished runs, the reference first."""
        return iter(self.trainings.values())

    def __repr__(self) -> str:
        """The folder and the sentence, for a terminal."""
        return f"<{type(self).__name__} {self.folder}: {self.sentence()}>"


def result_of(command: Any, outcome: Outcome, folder: Path) -> Result:
    """The result of a study of the class `command`. Raises RecordError: a record is damaged."""
    trainings = {}
    for name in outcome.finished:
        if (folder / name / MANIFEST).is_file():
            record = read_record(folder / name)
            evaluations = record.evaluations
            trainings[name] = Training(
                name=name,
                record=record,
                step=np.array([step.step for step in record.steps], dtype=np.int64),
                **{curve: np.array([getattr(step, curve) for step in record.steps]) for curve in CURVES},
                evaluated_after=np.array([one.step for one in evaluations], dtype=np.int64),
                train_loss=np.array([one.train for one in evaluations], dtype=np.float64),
                validation_loss=np.array([one.validation for one in evaluations], dtype=np.float64),
            )
    page = page_of(outcome.study, folder)
    found = msgspec.structs.replace(
        findings_in(command, outcome, folder), folder=str(folder), page=str(page) if page.is_file() else ""
    )
    return Result(outcome=outcome, findings=found, folder=folder, trainings=trainings)
