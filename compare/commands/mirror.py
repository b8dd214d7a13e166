"""`shardpair mirror`: the same question, answered four times: how long each answer is."""

import ast
import io
import tokenize
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


GUARDS = {"torchpar/manual": "torchpar/guards"}
"""By an engine's folder, that of its guards: what serves modules of others, and the engine does not run."""
SHARED = "compare/pipeline"
"""The room of both sides that a strategy's code lies in, too: schedules, and what engines make of them."""


class Lesson(Struct, frozen=True, kw_only=True):
    """The length of one strategy in one engine."""

    code: int
    """Lines of code of the strategy's own file."""
    with_helpers: int
    """And of its helpers."""
    lines: int
    """All lines of its own file: with docstrings, comments and blanks."""
    helpers: list[str]
    """Files that this strategy uses, relative to the engine's folder; those of `SHARED`, to the root."""


class Mirror(Struct, frozen=True, kw_only=True):
    """Count the lines of code of each strategy in each engine, alone and with its helpers.

    Blank lines, comments and docstrings do not count. A helper is a file of the engine's folder, or of
    compare/pipeline, that the strategy uses; one that several use counts in each row. Guards, which serve any
    module and which no engine runs, are a row of their own. Short is a finding, not an aim.
    """

    json: bool = False
    """Print one JSON object on stdout instead of a table: lines of code, with helpers, all lines, helpers."""

    def __call__(self, default: Experiment) -> int:
        """Print the table. Returns 0."""
        if self.json:
            print_json({**lessons(), "guards": guards()})
            return 0
        table = Table(title="Lines of code of the strategy's file / with the helpers that it uses")
        table.add_column("strategy")
        for folder in FOLDERS.values():
            table.add_column(folder, justify="right")
        for row in rows():
            table.add_row(*row)
        results_console().print(table)
        return 0


def rows() -> list[tuple[str, ...]]:
    """The table: a row for each strategy, and one for guards."""
    strategies = [(f"{name}.py", *map(lengths, found.values())) for name, found in lessons().items()]
    counts = guards()
    return [*strategies, ("guards", *(str(counts.get(folder, "")) for folder in FOLDERS.values()))]


def lengths(lesson: Lesson) -> str:
    """The cell of one lesson: its own lines, and with helpers if it has any."""
    return f"{lesson.code} / {lesson.with_helpers}" if lesson.helpers else str(lesson.code)


def guards() -> dict[str, int]:
    """Lines of code of guards, by the folder of the engine that they guard."""
    return {
        folder: sum(lines_of_code(source) for source in sources_below(source_root() / place).values())
        for folder, place in GUARDS.items()
    }


def lessons() -> dict[str, dict[str, Lesson]]:
    """Every strategy's length, by its name and by the engine's folder."""
    by_folder = {folder: lessons_of(source_root() / folder) for folder in FOLDERS.values()}
    return {
        strategy: {folder: found[strategy] for folder, found in by_folder.items()} for strategy in STRATEGIES
    }


def lessons_of(folder: Path) -> dict[str, Lesson]:
    """The strategies of one engine, by name.

    A helper of a strategy is a file below the engine's folder, or in `SHARED`, that the strategy imports,
    directly or through other files. A file that no strategy imports belongs, with what it imports, to the one
    that it builds on: a runner, or an optimizer that shares the machinery. Not counted: `__init__.py`, where
    strategies are put together, and all that lies outside of the two folders, such as `comm/`.
    """
    root = folder.parents[1]
    sources = sources_below(folder) | sources_below(root / SHARED)
    name_of = {".".join(path.relative_to(root).with_suffix("").parts): path for path in sources}
    imports = {path: {name_of[n] for n in imported_by(s) & name_of.keys()} for path, s in sources.items()}
    own = {folder / f"{strategy}.py": strategy for strategy in STRATEGIES}
    users = {path: {s for start, s in own.items() if path in _reached(start, imports)} for path in sources}
    used: dict[str, set[Path]] = {strategy: set() for strategy in STRATEGIES}
    for path in sources_below(folder):
        reached = _reached(path, imports)
        if owner := own.get(path) or (None if users[path] else _built_on(reached, users, own)):
            used[owner] |= reached - own.keys()
    return {
        strategy: Lesson(
            code=lines_of_code(sources[path]),
            with_helpers=sum(lines_of_code(sources[one]) for one in (path, *used[strategy])),
            lines=len(sources[path].splitlines()),
            helpers=sorted(_shown(one, folder, root) for one in used[strategy]),
        )
        for path, strategy in own.items()
    }


def sources_below(folder: Path) -> dict[Path, str]:
    """The text of every Python file below a folder, `__init__.py` apart."""
    found = (path for path in sorted(folder.rglob("*.py")) if path.name != "__init__.py")
    return {path: path.read_text(encoding="utf-8") for path in found}


def _built_on(reached: set[Path], users: dict[Path, set[str]], own: dict[Path, str]) -> str | None:
    """The strategy that a file builds on: the only one that it imports, or else whose helpers it does."""
    strategies = {own[path] for path in reached & own.keys()}
    helped = {strategy for path in reached if len(users[path]) == 1 for strategy in users[path]}
    found = strategies or helped
    return found.pop() if len(found) == 1 else None


def _shown(path: Path, folder: Path, root: Path) -> str:
    return path.relative_to(folder if path.is_relative_to(folder) else root).as_posix()


def _reached(start: Path, imports: dict[Path, set[Path]]) -> set[Path]:
    """`start`, and what it imports, directly or not."""
    reached, ahead = {start}, [start]
    while ahead:
        new = imports[ahead.pop()] - reached
        reached |= new
        ahead += new
    return reached


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
