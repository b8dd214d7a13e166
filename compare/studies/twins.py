"""Silent twins: what `shardpair profile` runs beside a comparison whose runs are watched.

A twin runs the same steps, and communicates nothing; what the real step takes beyond it is the communication
that compute does not hide.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from compare.contract.record import MANIFEST, Record, read_failure, read_record
from compare.contract.request import Request
from compare.contract.run_lock import lock_folder
from compare.execute.launch import EngineError, launch
from compare.execute.progress import Reporter
from compare.host.tensors import RecordError
from compare.judge.comparison import Comparison
from compare.judge.profile import NOT_ASKED
from compare.spec.engines.registry import ENGINES
from compare.studies.cases import Settings
from compare.studies.runner import Runner

ALONE = "nothing is communicated on one device"


def twin_of(request: Request) -> Request | str:
    """The request of an engine's silent twin, or why there is none."""
    if why := ENGINES[request.engine].no_twin:
        return why
    if request.experiment.layout.devices == 1:
        return ALONE
    return msgspec.structs.replace(request, profile=False, silent=True)


def twin_folder(folder: Path, name: str) -> Path:
    """The folder of a case's twin, beside that of the case."""
    return folder / f"{name}.silent"


def run_twins(
    comparison: Comparison, folder: Path, *, settings: Settings, reporter: Reporter
) -> dict[str, Record | str]:
    """Run the silent twin of every finished case that has one, and is not there yet.

    Args:
        comparison: whose runs were watched.
        folder: its own.
        settings: the interpreters.
        reporter: told of the progress.

    Returns:
        By case: the twin's record, or why there is none. One that fails ends no other.

    Raises:
        Interrupted: Ctrl-C; the profile can be gone on with.
    """
    found = read_twins(comparison, folder)
    asked = {name: twin_of(comparison.requests[name]) for name in comparison.cases}
    missing = {
        name: request
        for name, request in asked.items()
        if isinstance(request, Request) and not isinstance(found[name], Record)
    }
    reporter.start({twin_folder(folder, name).name: one for name, one in missing.items()}, folder)
    with lock_folder(folder):
        _Twins(comparison, folder, settings, reporter, found, missing).run()
    return found


class _Twins(Runner[Comparison]):
    """A piece is the twin of a case: the comparison stays as it is."""

    found: dict[str, Record | str]
    missing: dict[str, Request]

    def pieces(self) -> Iterator[str]:
        yield from self.missing

    def measured(self, piece: str) -> Comparison:
        place, settings = twin_folder(self.folder, piece), self.settings
        shutil.rmtree(place, ignore_errors=True)  # of one that was ended halfway
        with self.reporter.engine(place.name) as told:
            how = {"pythons": settings.pythons, "hosts": settings.hosts, "on_step": told}
            self.found[piece] = launch(self.missing[piece], place, **how)
        return self.outcome

    def failed(self, piece: str, error: EngineError) -> Comparison:
        self.found[piece] = str(error)
        return self.outcome

    def kept(self) -> str:
        how = self.outcome.how_to_go_on(self.folder)
        return f"Finished and kept: {', '.join(self.outcome.cases)}. `{how}` runs the silent twins"


def read_twins(comparison: Comparison, folder: Path) -> dict[str, Record | str]:
    """By case: the record of the twin that was run, or why there is none."""
    return {name: _read(comparison.requests[name], twin_folder(folder, name)) for name in comparison.cases}


def _read(request: Request, place: Path) -> Record | str:
    asked = twin_of(request)
    if isinstance(asked, str):
        return asked
    if not (place / MANIFEST).is_file():
        failure = read_failure(place)
        return failure.message if failure else NOT_ASKED
    try:
        record = read_record(place)
    except RecordError as error:
        return str(error)
    return record if record.request == asked else f"{place} holds another run than the twin's"
