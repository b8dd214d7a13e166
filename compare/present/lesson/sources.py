"""The four files of a lesson: their text from the tree, their collectives, and what their docstrings say."""

import ast
import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from compare.host.tensors import RecordError
from compare.pipeline.instructions import Instruction
from compare.present.lesson.marks import Mark, enclosing_functions, find_marks
from compare.present.lesson.names import NAMES
from compare.studies.lessons import FOLDERS, source_file, source_root


class Source(Struct, frozen=True, kw_only=True):
    """One engine's file of a strategy."""

    engine: str
    path: str
    """From the folder that has the packages."""
    text: str
    marks: list[Mark]
    functions: Mapping[int, str]
    """Around each line, where there is one."""

    @property
    def summary(self) -> str:
        """The first sentence of the file's docstring."""
        docstring = ast.get_docstring(ast.parse(self.text)) or ""
        first = " ".join(docstring.split("\n\n")[0].split())
        return re.split(r"(?<=\.)\s", first, maxsplit=1)[0]

    def line_of(self, instruction: Instruction) -> int:
        """The line of this file that caused an instruction; 0 if none did.

        Of several in the stack the innermost that has a collective, else the innermost.
        """
        lines = [
            place.line
            for place in instruction.stack
            if place.file == self.path and self.has(place.line, place.function)
        ]
        marked = {mark.line for mark in self.marks}
        return next((line for line in lines if line in marked), (lines or [0])[0])

    def has_moved(self, instruction: Instruction) -> bool:
        """True if the file is no longer what was compiled: another function is at a line of the stack."""
        return any(
            place.file == self.path and not self.has(place.line, place.function)
            for place in instruction.stack
        )

    def has(self, line: int, function: str | None) -> bool:
        """True if a function, by its qualified name, is still at a line; also where none is told."""
        names = [name for name in (function or "").strip(" ()").split(".") if not name.startswith("<")]
        return not any(names) or self.functions.get(line, "") == names[-1]


def read_sources(strategy: str, engines: Sequence[str]) -> list[Source]:
    """The files of a strategy, of these engines, from the tree that runs.

    Raises:
        RecordError: a file is not there, or uses no collective that is known.
    """
    return [_source(engine, source_file(engine, strategy)) for engine in engines]


def _source(engine: str, path: str) -> Source:
    try:
        text = (source_root() / path).read_text(encoding="utf-8")
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({error.strerror}): a lesson is made from it") from None
    marks = find_marks(text, NAMES[FOLDERS[engine]], path=path)
    return Source(engine=engine, path=path, text=text, marks=marks, functions=enclosing_functions(text))
