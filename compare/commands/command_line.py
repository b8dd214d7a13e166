"""Reading one command's line: tyro reads it; what it refuses is said in one line, naming the right help."""

import contextlib
import difflib
import io
import pathlib
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import tyro
from msgspec import Struct
from msgspec.inspect import BoolType, FloatType, IntType, LiteralType, UnionType, VarTupleType

from compare.spec.experiment import ExperimentError, shortened

Command = TypeVar("Command", bound=Struct)
_NUMBERS: dict[type, tuple[type[int] | type[float], str]] = {
    IntType: (int, "a whole number"),
    FloatType: (float, "a number"),
}


class Flag(Struct, frozen=True):
    """A flag, or an argument by its place."""

    name: str
    kind: msgspec.inspect.Type
    """Of one value."""
    takes: int
    """Values: 0 for a switch, 1, or -1 for any number."""
    is_required: bool


def read_line(command: type[Command], line: Sequence[str], *, prog: str, default: Command | None) -> Command:
    """A command from its words.

    Args:
        command: its fields are the flags.
        line: the words behind the command's.
        prog: how it is called, for help and messages.
        default: what is not in the line; None if there are no defaults but the command's.

    Raises:
        ExperimentError: one line: the word that is wrong, what would be right, and which help has more.
        SystemExit: code 0, after --help was printed.
    """
    boxes = io.StringIO()
    defaults: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(boxes):
            return tyro.cli(command, args=list(line), prog=prog, use_underscores=True, **defaults)
    except SystemExit as ended:
        if not ended.code:
            raise
    raise ExperimentError(f"{why_refused(command, line) or _words_of(boxes.getvalue())}; see {prog} --help")


def suggestion(word: str, known: Iterable[str]) -> str:
    """` (did you mean X?)`, if there is one like it."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def why_refused(command: type[Struct], line: Sequence[str]) -> str:
    """The first wrong word of a line that was refused, and what would be right; '' if none is found."""
    found = list(_flags(command))
    flags = {flag.name: flag for flag in found if flag.name.startswith("--")}
    places = [flag for flag in found if not flag.name.startswith("--")]
    flags |= {_negated(flag.name): flag for flag in flags.values() if not flag.takes}
    words = list(line)
    while words:
        word = words.pop(0)
        if not _is_flag(word):
            if not places:
                return f"{shortened(word)}: no flag takes this"
            if why := _objection(places.pop(0).kind, word):
                return f"{shortened(word)}: {why}"
            continue
        name, equals, value = word.partition("=")
        flag = flags.get(name.replace("-", "_").replace("__", "--", 1))
        if flag is None:
            return f"{shortened(name)}: no such flag{suggestion(name, flags)}"
        values = [value] if equals else []
        while words and not equals and not _is_flag(words[0]) and len(values) != flag.takes:
            values.append(words.pop(0))
        if not flag.takes and (equals or (words and not _is_flag(words[0]) and not places)):
            stray = value or words[0]
            return f"{name} {shortened(stray)}: a switch takes no value: {flag.name} or {_negated(flag.name)}"
        if flag.takes == 1 and not values:
            return f"{name}: give {_expected(flag.kind)} behind it"
        for one in values:
            if why := _objection(flag.kind, one):
                return f"{name} {shortened(one)}: {why}"
    missing = next((flag for flag in places if flag.is_required), None)
    return f"{missing.name} is missing: give {_expected(missing.kind)}" if missing else ""


def _flags(command: type[Struct], prefix: str = "") -> Iterator[Flag]:
    """The flags of a command and of its sections, in their order; an argument by its place is in capitals."""
    hints = typing.get_type_hints(command, include_extras=True)
    for field in msgspec.structs.fields(command):
        marks = getattr(hints[field.name], "__metadata__", ())
        if tyro.conf.Suppress in marks:
            continue
        kind = msgspec.inspect.type_info(field.type)
        while isinstance(kind, msgspec.inspect.Metadata):
            kind = kind.type
        if isinstance(kind, msgspec.inspect.StructType):
            yield from _flags(kind.cls, f"{field.name}.")
            continue
        takes = -1 if isinstance(kind, VarTupleType) else 0 if isinstance(kind, BoolType) else 1
        one = kind.item_type if isinstance(kind, VarTupleType) else kind
        name = next((mark.name for mark in marks if getattr(mark, "name", None)), field.name)
        is_place = tyro.conf.Positional in marks
        shown = name.upper() if is_place else f"--{prefix}{name}"
        yield Flag(shown, one, takes, is_required=field.default is msgspec.NODEFAULT)


def _is_flag(word: str) -> bool:
    """True for --name; a negative number is a value."""
    return word.startswith("-") and not word[1:2].isdecimal() and word[1:2] not in ("", ".")


def _negated(flag: str) -> str:
    """`--section.no_name` of `--section.name`."""
    section, dot, name = flag.removeprefix("--").rpartition(".")
    return f"--{section}{dot}no_{name}"


def _objection(kind: msgspec.inspect.Type, word: str) -> str:
    """Why a word is no value of a kind; '' if it may be."""
    if isinstance(kind, UnionType):
        whys = [_objection(one, word) for one in kind.types if not isinstance(one, msgspec.inspect.NoneType)]
        return "" if "" in whys else whys[0]
    if isinstance(kind, LiteralType):
        choices = [str(value) for value in kind.values]
        return "" if word in choices else f"give {_expected(kind)}{suggestion(word, choices)}"
    if type(kind) in _NUMBERS:
        number, _ = _NUMBERS[type(kind)]
        try:
            number(word)
        except ValueError:
            return f"give {_expected(kind)}"
    return ""


def _expected(kind: msgspec.inspect.Type) -> str:
    if isinstance(kind, UnionType):
        kind = next(one for one in kind.types if not isinstance(one, msgspec.inspect.NoneType))
    if isinstance(kind, LiteralType):
        return f"one of {', '.join(str(value) for value in kind.values if value != '')}"
    if type(kind) in _NUMBERS:
        return _NUMBERS[type(kind)][1]
    return "a path" if getattr(kind, "cls", None) is pathlib.Path else "a value"


def _words_of(box: str) -> str:
    """The words in the box that tyro draws, for what we found nothing wrong with."""
    lines = [line.strip("╭╮╰╯│─ \n") for line in box.splitlines()]
    return shortened(" ".join(line for line in lines if line)) or "it cannot be read"
