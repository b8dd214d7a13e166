"""Which flags were given, whatever their values: asked of the parser, not guessed from the defaults."""

from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import Struct

Command = TypeVar("Command", bound=Struct)


def flags_given(found: Command, default: Command, read: Callable[[Command], Command]) -> frozenset[str]:
    """Names of the flags that a command line gives, such as `rounds` and `layout.microbatches`.

    The line, which was read over the defaults, is read again over others that differ in every number, choice
    and text: what comes out the same both times is what the line says.

    Args:
        found: the command that the line gives over the defaults.
        default: the defaults.
        read: the parser with the line in it: a command, from its defaults.

    Returns:
        Names without dashes. Flags whose default is empty are not among them: given, they are not empty.
    """
    other = _another(default)
    before, instead = _flat(default), _flat(other)
    first, second = _flat(found), _flat(read(other))
    return frozenset(
        name for name, value in before.items() if value != instead[name] and first[name] == second[name]
    )


def _flat(struct: Struct, prefix: str = "") -> dict[str, object]:
    """Fields by name, those of sections behind the section's: `layout.tp`."""
    found: dict[str, object] = {}
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        found |= _flat(value, f"{name}.") if isinstance(value, Struct) else {f"{prefix}{name}": value}
    return found


def _another(struct: Command) -> Command:
    """The struct with another value in every field whose value is a switch, a number, a choice or a text."""
    types = [msgspec.inspect.type_info(field.type) for field in msgspec.structs.fields(struct)]
    return msgspec.structs.replace(
        struct,
        **{
            name: _other(getattr(struct, name), kind)
            for name, kind in zip(struct.__struct_fields__, types, strict=True)
        },
    )


def _other(value: object, kind: msgspec.inspect.Type) -> object:
    match value, kind:
        case Struct(), _:
            return _another(value)
        case _, msgspec.inspect.LiteralType(values=values):
            return next(choice for choice in values if choice != value)
        case bool(), _:
            return not value
        case int() | float(), _:
            return type(value)(0 if value else 1)
        case str(), _ if value:
            return value + "?"
    return value
