"""`shardpair mirror`: the same question, answered four times: how long each answer is."""

import ast
import io
import tokenize
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct
from rich.table import Table

from compare.spec.experiment import Experiment
from compare.studies.lessons import FOLDERS, STRATEGIES, source_root
from compare.terminal.console import print_json, results_console

_LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
)


class Lesson(Struct, frozen=True, kw_only=True):
    """The length of one strategy in one engine."""

    code: int
    """Lines of code of the strategy's own file."""
    with_helpers: int
    """And of its helpers."""
    lines: int
    """All lines of its own file: with docstrings, comments and blanks."""
    helpers: list[str]
    """Files that this strategy alone uses, relative to the engine's folder."""


class Mirror(Struct, frozen=True, kw_only=True):
    """Count the lines of code of each strategy in each engine, alone and with its helpers.

    Blank lines, comments and docstrings do not count. A helper is a file of the engine's folder that one
    strategy alone uses. Short is a finding, not an aim.
    """

    json: bool = False
    """Print one JSON object on stdout instead of a table: lines of code, with helpers, all lines, helpers."""

    def __call__(self, default: Experiment) -> int:
        """Print the table. Returns 0."""
        counts = lessons()
        if self.json:
            print_json(counts)
            return 0
        table = Table(title="Lines of code of the strategy's file / with the helpers that it alone uses")
        table.add_column("strategy")
        for folder in FOLDERS.values():
            table.add_column(folder, justify="right")
        for strategy, by_folder in counts.items():
            table.add_row(f"{strategy}.py", *map(lengths, by_folder.values()))
        results_console().print(table)
        return 0


def lengths(lesson: Lesson) -> str:
    """The cell of one lesson: its own lines, and with helpers if it has any."""
    return f"{lesson.code} / {lesson.with_helpers}" if lesson.helpers else str(lesson.code)


def lessons() -> dict[str, dict[str, Lesson]]:
    """Every strategy's length, by its name and by the engine's folder."""
    by_folder = {folder: lessons_of(source_root() / folder) for folder in FOLDERS.values()}
    return {
        strategy: {folder: found[strategy] for folder, found in by_folder.items()} for strategy in STRATEGIES
    }


def lessons_of(folder: Path) -> dict[str, Lesson]:
    """The strategies of one engine, by name.

    A file below the engine's folder is a helper of a strategy if, of the four, this one alone imports it,
    directly or through other files. A file that no strategy imports is a helper of the strategy that it, or
    what it imports, belongs to, if that is one alone: a runner, or an optimizer that shares the machinery.
    Not counted: files that several strategies use, `__init__.py`, where they are put together, and all that
    lies outside of the folder, such as `comm/`.
    """
    files = {
        ".".join(path.relative_to(folder).with_suffix("").parts): path
        for path in sorted(folder.rglob("*.py"))
        if path.name != "__init__.py"
    }
    sources = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    package = f"{folder.parent.name}.{folder.name}."
    imports = {
        name: {imported.removeprefix(package) for imported in imported_by(source)} & files.keys()
        for name, source in sources.items()
    }
    reached = {name: _reached(name, imports) for name in files}
    users = {name: {s for s in STRATEGIES if name in reached[s]} for name in files}
    owners = {name: found or _owners(reached[name], users) for name, found in users.items()}
    lengths_of = {name: lines_of_code(source) for name, source in sources.items()}
    found = {}
    for strategy in STRATEGIES:
        helpers = [name for name in files if name not in STRATEGIES and owners[name] == {strategy}]
        found[strategy] = Lesson(
            code=lengths_of[strategy],
            with_helpers=sum(lengths_of[name] for name in (strategy, *helpers)),
            lines=len(sources[strategy].splitlines()),
            helpers=[files[name].relative_to(folder).as_posix() for name in helpers],
        )
    return found


def _reached(start: str, imports: dict[str, set[str]]) -> set[str]:
    """`start`, and what it imports, directly or not."""
    reached, ahead = {start}, [start]
    while ahead:
        new = imports[ahead.pop()] - reached
        reached |= new
        ahead += new
    return reached


def _owners(reached: Iterable[str], users: dict[str, set[str]]) -> set[str]:
    """The strategies that files belong to, each of one strategy alone."""
    return {owner for name in reached if len(users[name]) == 1 for owner in users[name]}


def imported_by(source: str) -> set[str]:
    """Full names of what a file imports: modules, and the names taken from them."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def lines_of_code(source: str) -> int:
    """Lines that hold code: neither blank, nor comment, nor docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT and token.type != tokenize.ENDMARKER:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)
