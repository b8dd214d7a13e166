"""The files of a lesson as HTML, and the lines that cause each row of a ledger, as the ledger says them."""

import ast
import re
from collections.abc import Mapping

from markupsafe import Markup
from msgspec import Struct
from pygments import highlight
from pygments.formatters.html import HtmlFormatter
from pygments.lexers.python import PythonLexer

from compare.contract.record import Record
from compare.host.tensors import RecordError
from compare.studies.lessons import source_file, source_root

_PLACE = re.compile(r"^([\w./-]+\.py):(\d+)")
LIBRARY = "torch.distributed"
"""Calls of what is imported from there send without a line of ours."""
MOST_PLACES = 3
Key = tuple[str, str, str]
"""Operation, axis and purpose of a row of a ledger."""


class Source(Struct, frozen=True, kw_only=True):
    """One engine's file of a strategy, and which of its lines sent something in a run."""

    engine: str
    path: str
    """From the folder that has the packages."""
    text: str
    lines: Mapping[Key, list[int]]
    """Lines of this file that cause a row."""
    elsewhere: Mapping[Key, list[str]]
    """Other places that a row comes from, if no line of this file causes it."""

    @property
    def summary(self) -> str:
        """The first sentence of the file's docstring."""
        docstring = ast.get_docstring(ast.parse(self.text)) or ""
        first = " ".join(docstring.split("\n\n")[0].split())
        return re.split(r"(?<=\.)\s", first, maxsplit=1)[0]

    @property
    def html(self) -> Markup:
        """The file with line numbers, line 12 with the anchor ENGINE-12, lines that send in a colour."""
        sends = {line for lines in self.lines.values() for line in lines}
        formatter = HtmlFormatter(
            linenos="inline",
            lineanchors=self.engine,
            anchorlinenos=True,
            hl_lines=sorted(sends | _library_lines(self.text)),
            cssclass="code",
        )
        return Markup(highlight(self.text, PythonLexer(), formatter))


def read_source(strategy: str, engine: str, record: Record) -> Source:
    """An engine's file of a strategy from the tree that runs, and what of a record came from it.

    A row of a ledger has its innermost line of ours. XLA also says from where that was called: of a stack
    this is the innermost line of the lesson, if it has one.

    Raises:
        RecordError: it is not there.
    """
    path = source_file(engine, strategy)
    try:
        text = (source_root() / path).read_text(encoding="utf-8")
    except OSError as error:
        raise RecordError(f"{path} cannot be read ({error.strerror}): a lesson is made from it") from None
    lines: dict[Key, set[int]] = {}
    elsewhere: dict[Key, dict[str, None]] = {}
    for row in record.ledger.rows:
        if place := _PLACE.match(row.source):
            key = row.kind, row.axis, row.purpose
            if place[1].rpartition("/")[2] == path.rpartition("/")[2]:
                lines.setdefault(key, set()).add(int(place[2]))
            else:
                elsewhere.setdefault(key, {})[place[0]] = None
    for one in record.instructions or ():
        if inside := [line.line for line in one.stack if line.file == path]:
            lines.setdefault((one.kind, one.axis, one.purpose), set()).add(inside[0])
    return Source(
        engine=engine,
        path=path,
        text=text,
        lines={key: sorted(numbers) for key, numbers in lines.items()},
        elsewhere={key: list(places)[:MOST_PLACES] for key, places in elsewhere.items() if key not in lines},
    )


def _library_lines(text: str) -> set[int]:
    tree = ast.parse(text)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    of_library = [node for node in imports if (node.module or "").startswith(LIBRARY)]
    names = {alias.asname or alias.name for node in of_library for alias in node.names}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id in names}


def styles() -> str:
    """Colours of code on light and dark ground."""
    light, dark = (HtmlFormatter(style=name).get_style_defs(".code") for name in ("default", "github-dark"))
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}"
