"""Command lines, parsed by tyro: help texts in whole lines, and errors in one line with the nearest name."""

import contextlib
import functools
import inspect
import io
import re
import shutil
import textwrap
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, SupportsIndex, cast, get_args, get_origin

import docstring_parser
import msgspec
import tyro
from msgspec import Struct, structs
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from compare.spec.experiment import ExperimentError, values_allowed
from compare.spec.names import did_you_mean, nearest

FLAG = re.compile(r"--?[A-Za-z]")
OWNERS = 3
"""Commands that an error names as those which have a flag."""
WIDEST = 100
"""Characters in a line of help."""
REGISTRY = ConstructorRegistry()


class Field(NamedTuple):
    """A value that a command line sets."""

    type: Any
    positional: str
    """Its name in the usage if it is given without a flag, else ''."""


@REGISTRY.struct_rule
def _struct(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Describe a struct to tyro, whose own rule keeps the line breaks of an indented docstring."""
    if not (isinstance(info.type, type) and issubclass(info.type, Struct)):
        return None
    fields = []
    for field in structs.fields(info.type):
        default = tyro.MISSING if field.default is msgspec.NODEFAULT else field.default
        default = getattr(info.default, field.name) if isinstance(info.default, info.type) else default
        marks = [tyro.conf.arg(help_behavior_hint="")] if default in (None, "", ()) else []
        marks += [tyro.conf.Suppress] if field.name in getattr(info.type, "fixed", ()) else []
        fields.append(
            StructFieldSpec(
                name=field.name,
                type=cast(type, functools.reduce(lambda of, mark: Annotated[of, mark], marks, field.type)),
                default=default,
                helptext=lambda name=field.name: _descriptions(info.type).get(name),
            )
        )
    return StructConstructorSpec(instantiate=info.type, fields=tuple(fields))


@functools.cache
def _descriptions(struct: type[Struct]) -> dict[str, str]:
    """Docstrings of a struct's fields, each in one line."""
    bases = [base for base in reversed(struct.__mro__) if base.__module__.startswith("compare")]
    described = [of for base in bases for of in docstring_parser.parse_from_object(base).params]
    return {of.arg_name: " ".join((of.description or "").split()) for of in described}


class Wrapped(str):
    """A text whose lines tyro keeps: it splits other texts into lines, and joins some of them."""

    __slots__ = ()

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return [str(self)]


def _help(command: type[Struct]) -> Wrapped:
    """The docstring of a command, as wide as the terminal."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    blocks = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return Wrapped("\n\n".join(of if of.startswith("Try:") else textwrap.fill(of, width) for of in blocks))


def parse(commands: Mapping[str, Any], word: str, line: Sequence[str], **options: Any) -> Any:
    """Parse the arguments of a command.

    Raises:
        ExperimentError: the line is wrong.
        SystemExit: with code 0 after --help.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(
                commands[word],
                args=line,
                prog=f"shardpair {word}",
                description=_help(commands[word]),
                use_underscores=True,
                registry=REGISTRY,
                config=(tyro.conf.DisallowNone,),
                **options,
            )
    except SystemExit as ended:
        if not ended.code:
            raise
    boxed = " ".join(re.sub(r"[^\x20-\x7e]", " ", said.getvalue()).split())
    raise ExperimentError(why_wrong(commands, word, line) or boxed)


def why_wrong(commands: Mapping[str, Any], word: str, line: Iterable[str]) -> str:
    """The first mistake of a command line that tyro rejects, and how to correct it; '' if it is not found."""
    fields = fields_of(commands[word])
    positional = [field for field in fields.values() if field.positional]
    given, loose = list[tuple[str, list[str]]](), list[str]()
    values = loose
    for argument in line:
        if FLAG.match(argument):
            flag, equals, value = argument.partition("=")
            values = [value] if equals else []
            given.append((flag, values))
        else:
            values.append(argument)
    for flag, values in given:
        name = flag.lstrip("-").replace("-", "_")
        on = re.sub(r"(^|\.)no_", r"\1", name)
        if name in getattr(commands[word], "fixed", ()):
            return f"--{name} has no effect: {word} sets it; leave it out"
        field = fields.get(name) or fields.get(on)
        if not field or field.positional or (name != on and field.type is not bool):
            return f"{flag}: {_unknown(commands, word, name)}"
        if field.type is bool:
            loose += values
            continue
        several = get_origin(field.type) is tuple
        if not values and not several:
            return f"{flag}: give a value"
        for value in values if several else values[:1]:
            if why := _why_not(value, field.type):
                return f"{flag} {value}: {f'separate {name} by spaces' if several and ',' in value else why}"
        loose += [] if several else values[1:]
    for value, field in zip(loose, positional, strict=False):
        if why := _why_not(value, field.type):
            return f"{field.positional} {value}: {why}"
    if extra := loose[len(positional) :]:
        return f"unexpected argument {extra[0]}: see shardpair {word} --help"
    missing = " ".join(field.positional for field in positional[len(loose) :])
    return f"give {missing}: see shardpair {word} --help" if missing else ""


def _why_not(value: str, of: Any) -> str:
    """Why a type does not allow a value on the command line; '' if it does."""
    of = get_args(of)[0] if get_origin(of) in (tuple, types.UnionType) else of
    try:
        msgspec.convert(value, of, strict=False, dec_hook=lambda kind, text: kind(text))
    except msgspec.ValidationError as error:
        meant = did_you_mean(value, map(str, get_args(of))).removeprefix("; ")
        return meant or f"give {values_allowed(error, of)}"
    return "give a whole number" if of is int and not re.fullmatch(r"[-+]?\d+", value) else ""


def _unknown(commands: Mapping[str, Any], word: str, name: str) -> str:
    """The remedy for an unknown flag."""
    own = fields_of(commands[word])
    owners = [other for other, command in commands.items() if name in fields_of(command)]
    names = nearest(name, own)
    if owners and not any(found.endswith(f".{name}") for found in names):
        others = f"{', '.join(owners[:OWNERS])}{' and others' * (len(owners) > OWNERS)}"
        return f"it belongs to {others}; leave it out of shardpair {word}"
    if not names:
        return f"no such flag; see shardpair {word} --help"
    metavar = own[names[0]].positional
    return f"give it without a flag: shardpair {word} {metavar}" if metavar else f"did you mean --{names[0]}?"


def fields_of(command: type[Struct], section: str = "") -> dict[str, Field]:
    """The values that a command line may set, by name, such as `rounds` and `layout.tp`."""
    found: dict[str, Field] = {}
    for field in structs.fields(command):
        of, *marks = get_args(field.type) if hasattr(field.type, "__metadata__") else (field.type,)
        name = section + field.name.removesuffix("_")
        if tyro.conf.Suppress in marks:
            continue
        if isinstance(of, type) and issubclass(of, Struct):
            found |= fields_of(of, f"{name}.")
        else:
            metavar = next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), name.upper())
            found[name] = Field(of, metavar * (tyro.conf.Positional in marks))
    return found
