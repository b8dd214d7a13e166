"""Collectives in a lesson's source, found in its syntax: where they stand, and what each sends."""

import ast
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct

from compare.contract import communication
from compare.contract.communication import OF_DERIVATIVE, SAID
from compare.host.tensors import RecordError
from compare.present.lesson.names import Names, Sends

PURPOSES = {
    name: value for name, value in vars(communication).items() if isinstance(value, str) and value in SAID
}
"""Name of a constant -> the purpose that it is."""


class Mark(Struct, frozen=True, kw_only=True):
    """One place in a source file where a name that makes data move is used."""

    line: int
    """Counted from 1; columns, in characters, from 0."""
    column: int
    end: int
    name: str
    """As in the table, whatever it is called in the file."""
    sends: tuple[tuple[str, str], ...]
    """(kind, purpose); purpose "" is any. () for what only says where data live."""

    def causes(self, kind: str, purpose: str) -> bool:
        """True if a row of the ledger of this kind and purpose comes from here."""
        return any(kind == own and said in ("", purpose) for own, said in self.sends)


def find_marks(source: str, names: Names, *, path: str) -> list[Mark]:
    """Every use of a known name, in the order of the file; imports and annotations are none.

    A name that is bound to one (`join = partial(all_gather, purpose=PARAMETERS)`) counts where it is used,
    with what was said where it was bound.

    Args:
        source: of one file.
        names: of its engine.
        path: of the file, for the error.

    Raises:
        RecordError: there is none. A lesson that shows nothing is no lesson.
    """
    tree = ast.parse(source)
    lines = source.splitlines()
    known = _Known(tree, names)
    found = {}
    for node, said in _uses(tree):
        if use := known.use(node):
            mark = _mark(node, use.name, known.sends(use.name, said or use.purpose), lines)
            found[mark.line, mark.column] = mark
    if not found:
        raise RecordError(
            f"{path} uses none of {', '.join(names)}: its lesson would show nothing; add the name of what "
            f"makes its data move to compare/present/lesson/names.py"
        )
    return [found[place] for place in sorted(found)]


class _Use(NamedTuple):
    """What a name refers to: a name of the table, and the purpose that was said where it was bound."""

    name: str
    purpose: str


class _Known:
    """Names of the table, and what a file calls them: by an import, or by an assignment in a function."""

    def __init__(self, tree: ast.Module, names: Names):
        self._names = names
        self._aliases = {
            alias.asname: alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.asname
        }
        self._functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        self._bound: dict[tuple[ast.FunctionDef | None, str], _Use] = {}
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call() as call) if _is_partial(call):
                    if use := self.use(call.args[0]):
                        self._bound[self._around(node), target] = _Use(use.name, _purpose(call))

    def use(self, node: ast.expr) -> _Use | None:
        """What an expression refers to; None if it is nothing of the table."""
        if isinstance(node, ast.Name):
            for function in (self._around(node), None):
                if bound := self._bound.get((function, node.id)):
                    return bound
            name = self._aliases.get(node.id, node.id)
        else:
            name = node.attr if isinstance(node, ast.Attribute) else ""
        return _Use(name, "") if name in self._names else None

    def sends(self, name: str, said: str) -> tuple[tuple[str, str], ...]:
        """(kind, purpose) of what a name of the table causes, if its call says a purpose, or ""."""
        return tuple(pair for sends in self._names[name] for pair in _pairs(sends, said))

    def _around(self, node: ast.stmt | ast.expr) -> ast.FunctionDef | None:
        """The outermost function that a node is in: a name may be used by the functions inside."""
        return next(
            (one for one in self._functions if one.lineno <= node.lineno <= (one.end_lineno or 0)), None
        )


def _uses(tree: ast.Module) -> Iterator[tuple[ast.expr, str]]:
    """Every name that is read, and the purpose that its call says."""
    unread = {id(part) for node in ast.walk(tree) for note in _annotations(node) for part in ast.walk(note)}
    said = {id(_called(node)): _purpose(node) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        is_read = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
        if isinstance(node, ast.Name | ast.Attribute) and is_read and id(node) not in unread:
            yield node, said.get(id(node), "")


def _annotations(node: ast.AST) -> list[ast.expr]:
    found = [getattr(node, "annotation", None), getattr(node, "returns", None)]
    return [note for note in found if isinstance(note, ast.expr)]


def _is_partial(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == "partial" and bool(call.args)


def _called(call: ast.Call) -> ast.expr:
    """What a call is a call of, also through `partial`."""
    return call.args[0] if _is_partial(call) else call.func


def _purpose(call: ast.Call) -> str:
    """The constant that `purpose=` names; "" if there is none, or it is computed."""
    given = next((keyword.value for keyword in call.keywords if keyword.arg == "purpose"), None)
    return PURPOSES.get(given.id, "") if isinstance(given, ast.Name) else ""


def _mark(node: ast.expr, name: str, sends: tuple[tuple[str, str], ...], lines: list[str]) -> Mark:
    shown = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    line = node.end_lineno or node.lineno
    # ast counts bytes.
    end = len(lines[line - 1].encode()[: node.end_col_offset].decode())
    return Mark(
        line=line,
        column=end - len(shown),
        end=end,
        name=name,
        sends=sends,
    )


def _pairs(sends: Sends, said: str) -> list[tuple[str, str]]:
    if sends.in_derivative:
        # Without a purpose it is each device's own value, whose gradient stays there.
        return [(sends.kind, OF_DERIVATIVE.get(said, said))] if said else []
    return [(sends.kind, purpose) for purpose in ((said,) if said else sends.purposes or ("",))]


def enclosing_functions(source: str) -> Mapping[int, str]:
    """The innermost function around each line that is in one."""
    found: dict[int, str] = {}
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    for node in sorted(functions, key=lambda node: node.lineno):  # inner ones begin later
        found.update(dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), node.name))
    return found
