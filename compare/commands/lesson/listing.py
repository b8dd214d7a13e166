"""A source file on the page of a lesson: blocks of its lines, of which those that send are open."""

import ast
import re
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby, pairwise

from markupsafe import Markup, escape
from msgspec import Struct
from pygments import highlight
from pygments.formatters.html import HtmlFormatter
from pygments.lexers.python import PythonLexer

from compare.setup.planted import ROOT

LIBRARY = "torch.distributed"
"""Calls of what is imported from there send without a line of ours."""
HEAD = "docstring and imports"
SHORT = 12
"""A block of fewer lines is not folded."""
MOST_NAMES = 3
"""Names of a folded block; more are counted."""


class Block(Struct, frozen=True, kw_only=True):
    """Lines of a file, from its head, functions and methods; folded lines have a title."""

    title: str
    html: Markup
    is_open: bool


class File(Struct, frozen=True, kw_only=True):
    """A source file in blocks."""

    path: str
    """From the folder that has the packages."""
    summary: Markup
    """The first sentence of its docstring."""
    blocks: list[Block]
    is_open: bool
    """Whether it has the strategy's name, or a line that sends."""


def anchor_of(engine: str, path: str, line: int) -> str:
    """The id of a line on the page, such as torch-manual-ring-12."""
    return f"{engine}-{path.rpartition('/')[2].removesuffix('.py')}-{line}"


def read_file(path: str, engine: str, sending: Collection[int], *, is_main: bool) -> File:
    """A file of the tree that runs.

    Lines that send, or call PyTorch's library, have a colour, and their blocks are open, with short blocks
    between them. The begin of a long block is folded, too. Without such lines all blocks but the first are
    open.
    """
    text = (ROOT / path).read_text(encoding="utf-8")
    tree = ast.parse(text)
    coloured = {*sending, *library_lines(tree)}
    lines = highlight(text, PythonLexer(), HtmlFormatter(nowrap=True)).splitlines()
    numbered = [
        Markup('<span class="line{}" id="{}"><a href="#{}">{}</a>{}\n</span>').format(
            " hll" if number in coloured else "", *[anchor_of(engine, path, number)] * 2, number, Markup(line)
        )
        for number, line in enumerate(lines, 1)
    ]
    begins = [(1, HEAD), *definitions(tree.body), (len(lines) + 1, "")]
    parts = []
    for (begin, name), (end, _) in pairwise(begins):
        first = min(coloured & {*range(begin, end)}, default=begin)
        if first - begin >= 2 * SHORT:
            parts.append((begin, first - SHORT, f"begin of {name}"))
            begin = first - SHORT
        parts.append((begin, end, name))
    marked = [name for begin, end, name in parts if coloured & {*range(begin, end)}] or [
        name for *_, name in parts if name != HEAD
    ]

    def is_open(part: tuple[int, int, str]) -> bool:
        return any(name == part[2] or name.startswith(f"{part[2]}.") for name in marked)

    blocks = []
    for opened, group in groupby(parts, is_open):
        (begin, _, _), *_ = of_group = list(group)
        end, names = of_group[-1][1], [name for *_, name in of_group]
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        title = f"lines {begin} to {end - 1}: {', '.join(names[:MOST_NAMES])}{more}"
        html = Markup().join(numbered[begin - 1 : end - 1])
        blocks.append(Block(title=title, html=html, is_open=opened or end - begin < SHORT))
    about = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
    summary = re.split(r"(?<=\.)\s", about, maxsplit=1)[0]
    return File(
        path=path,
        summary=Markup(re.sub("`(.+?)`", r"<code>\1</code>", str(escape(summary)))),
        blocks=blocks,
        is_open=is_main or bool(sending),
    )


def definitions(body: Iterable[ast.stmt], inside: str = "") -> Iterator[tuple[int, str]]:
    """First line and name of each function, class and method, in their order."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield min([node.lineno, *(one.lineno for one in node.decorator_list)]), inside + node.name
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body, f"{inside}{node.name}.")


def library_lines(tree: ast.AST) -> set[int]:
    """Lines that call a function imported from PyTorch's library."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    of_library = [node for node in imports if (node.module or "").startswith(LIBRARY)]
    names = {alias.asname or alias.name for node in of_library for alias in node.names}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id in names}
