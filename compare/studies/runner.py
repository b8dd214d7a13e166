"""The one loop of all studies: piece by piece, each kept as soon as it is there.

A new study is a folder with a plan in it, an old one is read under its lock and goes on with the same source.
What a piece is, how it is measured, and what its failure means: a subclass of `Runner` in the study's file.
"""

import contextlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Generic

from msgspec import Struct

from compare.contract.run_lock import lock_folder
from compare.execute.launch import EngineError
from compare.execute.paths import create_run_dir
from compare.execute.progress import Reporter
from compare.execute.source import require_same_source
from compare.host.tensors import RecordError
from compare.judge.outcome import AnyOutcome, read_outcome, save
from compare.studies.cases import Interrupted, Settings


@contextlib.contextmanager
def new_folder(name: str, run_dir: str) -> Generator[Path]:
    """The folder of a new study, under its lock. Raises ExperimentError: as `create_run_dir`."""
    folder = create_run_dir(name, run_dir)
    with lock_folder(folder):
        yield folder


@contextlib.contextmanager
def saved_in(folder: Path, kind: type[AnyOutcome], *, begun: str = "begun") -> Generator[AnyOutcome]:
    """What a study has saved, under the lock of its folder, to go on with it.

    Args:
        folder: of the study.
        kind: of its outcome.
        begun: what was done with the source, such as timed.

    Raises:
        RecordError: there is none, or it is garbled.
        ExperimentError: another version of the source began it: what they leave would be mixed.
    """
    read_outcome(folder, kind)  # says what is wrong with a folder that is none
    with lock_folder(folder):
        saved = read_outcome(folder, kind)
        made = saved.circumstances
        require_same_source(folder, made.git_commit, made.git_dirty, begun=begun)
        yield saved


class Runner(Struct, Generic[AnyOutcome]):
    """Measures the pieces of a study in turn. One that fails is told and noted, and the others still run."""

    outcome: AnyOutcome
    """So far: the plan, or what was saved."""
    folder: Path
    """Of the study, whose lock is held."""
    settings: Settings
    reporter: Reporter

    def pieces(self) -> Iterator[str]:
        """Names of what is still to be measured; `outcome` has what came before each."""
        raise NotImplementedError

    def measured(self, piece: str) -> AnyOutcome:
        """The outcome with one more piece. Raises EngineError, RecordError: it did not finish."""
        raise NotImplementedError

    def failed(self, piece: str, error: EngineError) -> AnyOutcome:
        """The outcome with the reason why a piece did not finish."""
        raise NotImplementedError

    def kept(self) -> str:
        """After Ctrl-C: what is there, and the command that runs the rest."""
        return f"Kept: {self.outcome.progress}. {self.rest()}"

    def rest(self) -> str:
        """The command that runs what is missing."""
        return f"`{self.outcome.how_to_go_on(self.folder)}` runs the rest"

    def run(self) -> AnyOutcome:
        """Measure every piece; the outcome is saved before the first and after each.

        Raises:
            Interrupted: Ctrl-C. Every process was ended, and what is finished is saved.
        """
        save(self.outcome, self.folder)
        try:
            for piece in self.pieces():
                try:
                    self.outcome = self.measured(piece)
                except EngineError as error:
                    self._note(piece, error)
                except RecordError as error:
                    why = f"{piece}: it left a record that cannot be read: {error}"
                    self._note(piece, EngineError(why, exit_code=1))
                save(self.outcome, self.folder)
        except KeyboardInterrupt:
            said = f"interrupted; every process was ended. {self.kept()}"
            raise Interrupted(said, self.folder) from None
        return self.outcome

    def _note(self, piece: str, error: EngineError) -> None:
        self.reporter.failed(error)
        self.outcome = self.failed(piece, error)
