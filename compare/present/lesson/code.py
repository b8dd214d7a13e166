"""A source file as HTML: syntax colours by Pygments, line numbers, collectives as links."""

from collections.abc import Iterator, Mapping, Sequence

from markupsafe import Markup, escape
from msgspec import Struct
from pygments.lexers.python import PythonLexer
from pygments.token import Token, _TokenType

from compare.present.lesson.marks import Mark

ROLES = {
    Token.Keyword.Constant: "n",
    Token.Keyword: "k",
    Token.Operator.Word: "k",
    Token.Literal.String.Doc: "c",
    Token.Literal.String: "s",
    Token.Literal.Number: "n",
    Token.Comment: "c",
    Token.Name.Function: "f",
    Token.Name.Class: "f",
    Token.Name.Decorator: "d",
}
"""Pygments' kinds of tokens -> classes of lesson.css; the first that fits. Others have the page's own ink."""


class Link(Struct, frozen=True):
    """Where a line leads."""

    anchor: str
    text: str


def highlighted(
    source: str,
    marks: Sequence[Mark],
    *,
    prefix: str,
    targets: Mapping[tuple[int, int], str],
    links: Mapping[int, Sequence[Link]],
) -> Markup:
    """Source as lines of HTML; those with a mark or a link have an anchor PREFIX-L12.

    Args:
        source: Python.
        marks: places to highlight.
        prefix: of the anchors.
        targets: (line, column) of a mark -> the anchor that it links to; without one it is no link.
        links: line -> what is written behind it.
    """
    by_line: dict[int, list[Mark]] = {}
    for mark in marks:
        by_line.setdefault(mark.line, []).append(mark)
    lines = []
    for number, tokens in enumerate(_lines(source), start=1):
        text = _line(tokens, by_line.get(number, []), targets)
        behind = Markup("").join(
            Markup('<a class="to" href="#{}">{}</a>').format(link.anchor, link.text)
            for link in links.get(number, ())
        )
        whole = "".join(part for _, part in tokens)
        indent = len(whole) - len(whole.lstrip())
        style = Markup(' style="--i:{}"').format(indent) if indent else ""
        is_led_to = number in by_line or number in links
        anchor = Markup(' id="{}-L{}"').format(prefix, number) if is_led_to else ""
        lines.append(Markup('<span class="l"{}{}>{}{}</span>').format(anchor, style, text, behind))
    return Markup("\n").join(lines)


def _lines(source: str) -> list[list[tuple[str, str]]]:
    """(class, text) of the tokens of each line."""
    lines: list[list[tuple[str, str]]] = [[]]
    for kind, text in PythonLexer(stripnl=False, ensurenl=False).get_tokens(source):
        first, *others = text.split("\n")
        lines[-1].append((_role(kind), first))
        lines += [[(_role(kind), part)] for part in others]
    return lines if any(text for _, text in lines[-1]) else lines[:-1]


def _role(kind: _TokenType) -> str:
    return next((role for known, role in ROLES.items() if kind in known), "")


def _line(tokens: list[tuple[str, str]], marks: list[Mark], targets: Mapping[tuple[int, int], str]) -> Markup:
    """One line: tokens of one class run together, marks around theirs."""
    found, column = Markup(""), 0
    for role, text in _joined(tokens):
        for part, mark in _cut(text, column, marks):
            inner = _marked(part, mark, targets) if mark else escape(part)
            found += Markup('<span class="{}">{}</span>').format(role, inner) if role and not mark else inner
        column += len(text)
    return found


def _joined(tokens: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    role, text = "", ""
    for other, more in tokens:
        if other != role and not more.isspace():
            if text:
                yield role, text
            role, text = other, more
        else:
            text += more
    if text:
        yield role, text


def _cut(text: str, start: int, marks: list[Mark]) -> Iterator[tuple[str, Mark | None]]:
    """A token's text in pieces: what a mark covers, and what lies between."""
    done = 0
    for mark in marks:
        begin, end = mark.column - start, mark.end - start
        if begin >= done and end <= len(text):
            if begin > done:
                yield text[done:begin], None
            yield text[begin:end], mark
            done = end
    if done < len(text):
        yield text[done:], None


def _marked(text: str, mark: Mark, targets: Mapping[tuple[int, int], str]) -> Markup:
    look = "mark" if mark.sends else "mark place"
    target = targets.get((mark.line, mark.column))
    if target:
        return Markup('<a class="{}" href="#{}">{}</a>').format(look, target, text)
    return Markup('<span class="{}">{}</span>').format(look, text)
