"""What lies beside a run: pages and files of its folder, and studies of the same experiment next to it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec
from msgspec import Struct

from compare.contract.ceiling import Ceiling
from compare.contract.memory_profile import MEMORY
from compare.contract.record import EVALUATIONS, LEDGER, MANIFEST, STEPS, Record
from compare.contract.timeline import TIMELINE
from compare.contract.work import WORK
from compare.host.tensors import RecordError
from compare.judge.outcome import OUTCOME, Outcome, read_outcome
from compare.judge.timed_outcome import TimedOutcome, timed
from compare.pipeline.instructions import HLO_COLLECTIVES
from compare.spec.engines.registry import side_of
from compare.spec.experiment import Experiment

OWN = {
    "profile.html": "where the time of one step goes",
    "lesson.html": "the strategy in every engine",
    OUTCOME: "verdicts and costs as JSON",
    "experiment.toml": "the experiment",
}
"""What may lie in a run's folder, besides the page itself."""
OF_ENGINE = (MANIFEST, STEPS, EVALUATIONS, LEDGER, HLO_COLLECTIVES, MEMORY, TIMELINE, WORK, "trace.json")
"""What may lie in an engine's folder and can be read by people."""


class FileLink(Struct, frozen=True):
    """A file beside the page."""

    text: str
    target: str
    """Relative to the page, as a URL."""
    about: str = ""


class MeasuredCeiling(Struct, frozen=True):
    """The fastest matrix products of this machine, and the study that measured them."""

    ceiling: Ceiling
    study: str
    """Its folder."""


def own_links(folder: Path) -> list[FileLink]:
    """The other pages of a run's folder, and its own files."""
    return [FileLink(name, quote(name), about) for name, about in OWN.items() if (folder / name).is_file()]


def files_of(name: str, record: Record) -> list[FileLink]:
    """The files that an engine's run left; `name` is its folder beside the page."""
    there = (file for file in OF_ENGINE if (record.folder / file).is_file())
    return [FileLink(file, quote(f"{name}/{file}")) for file in there]


def links_beside(folder: Path, comparison: Outcome) -> list[FileLink]:
    """Pages of studies next to a run that train the same experiment, on any layout; not of other runs."""
    found = []
    for path in _neighbours(folder):
        what, page, experiment = _said_of(path)
        if page and experiment and what != comparison.study and _same_work(experiment, comparison.experiment):
            found.append(FileLink(path.name, quote(f"../{path.name}/{page}"), what))
    return found


def ceilings_beside(folder: Path, comparison: Outcome, records: list[Record]) -> list[MeasuredCeiling | None]:
    """For each record the fastest ceiling that a study next to it measured on such a device; None for none.

    Args:
        folder: of the run.
        comparison: its platform and machine.
        records: one for each case.
    """
    outcomes = [(path.name, one) for path in _neighbours(folder) if (one := _timed(path)) is not None]
    return [_fastest(record, comparison, outcomes) for record in records]


def _fastest(
    record: Record, comparison: Outcome, outcomes: list[tuple[str, TimedOutcome]]
) -> MeasuredCeiling | None:
    manifest = record.manifest
    products = f"{side_of(manifest.engine).name} {manifest.experiment.precision.product_dtype}"
    found = [
        MeasuredCeiling(outcome.ceilings[products], name)
        for name, outcome in outcomes
        if products in outcome.ceilings
        and outcome.platform == manifest.platform
        and outcome.circumstances.machine.system == comparison.circumstances.machine.system
        and any(how.device_kind == manifest.device_kind for how in outcome.how.values())
    ]
    return max(found, key=lambda one: one.ceiling.flops_per_s, default=None)


def _neighbours(folder: Path) -> Iterator[Path]:
    """The other folders next to a folder, by name; links are none."""
    own = folder.absolute()
    with contextlib.suppress(OSError):
        for path in sorted(own.parent.iterdir()):
            is_folder = path.is_dir() and not path.is_symlink() and os.access(path, os.R_OK | os.X_OK)
            if is_folder and path != own:
                yield path


def _said_of(folder: Path) -> tuple[str, str, Experiment | None]:
    """Command, page and experiment of a folder; "" and None where it holds no result with a page."""
    with contextlib.suppress(RecordError, OSError):
        if (folder / OUTCOME).is_file():
            saved = read_outcome(folder)
            pages = [name for name in (f"{saved.study}.html", "report.html") if (folder / name).is_file()]
            return saved.study, next(iter(pages), ""), saved.experiment
    return "", "", None


def _timed(folder: Path) -> TimedOutcome | None:
    with contextlib.suppress(RecordError, OSError):
        if (folder / OUTCOME).is_file() and "timing" in (saved := read_outcome(folder)).more:
            return timed(saved)
    return None


def _same_work(one: Experiment, other: Experiment) -> bool:
    """True if two experiments differ in their layout and their number of steps alone."""
    train = msgspec.structs.replace(one.train, max_iters=other.train.max_iters)
    return msgspec.structs.replace(one, layout=other.layout, train=train) == other
