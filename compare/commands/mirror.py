"""`shardpair mirror`: the same question, answered four times: how long each answer is."""

import ast
import importlib.util
import io
import tokenize
from pathlib import Path

from msgspec import Struct
from rich.table import Table

from compare.contract.engines.registry import ENGINES
from compare.contract.experiment import Experiment
from compare.terminal.console import print_json, results_console

FOLDERS = tuple(f"{engine.side}/{engine.folder}" for engine in ENGINES.values() if engine.folder)
STRATEGIES = ("data_parallel", "fully_sharded", "tensor_parallel", "pipeline_parallel")
_LAYOUT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
)


class Mirror(Struct, frozen=True, kw_only=True):
    """Count the lines of code of each strategy in each engine: the four-engine lesson in one table.

    Blank lines, comments and docstrings do not count. Short is a finding, not an aim.
    """

    json: bool = False
    """Print one JSON object on stdout instead of a table: lines of code, and all lines."""

    def __call__(self, default: Experiment) -> int:
        """Print the table. Returns 0."""
        counts = {
            strategy: {folder: _counts(folder, strategy) for folder in FOLDERS} for strategy in STRATEGIES
        }
        if self.json:
            print_json(counts)
            return 0
        table = Table(title="Lines of code (lines with docstrings, comments and blanks)")
        table.add_column("strategy")
        for folder in FOLDERS:
            table.add_column(folder, justify="right")
        for strategy, by_folder in counts.items():
            cells = (f"{count['code']} ({count['lines']})" if count else "-" for count in by_folder.values())
            table.add_row(f"{strategy}.py", *cells)
        results_console().print(table)
        return 0


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


def _counts(folder: str, strategy: str) -> dict[str, int] | None:
    """Lines of code and all lines of one file; None if there is no such file."""
    path = _root() / folder / f"{strategy}.py"
    if not path.is_file():
        return None
    source = path.read_text(encoding="utf-8")
    return {"code": lines_of_code(source), "lines": len(source.splitlines())}


def _root() -> Path:
    """Where both sides lie: beside `compare`, found without importing them."""
    spec = importlib.util.find_spec("compare")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.parent
