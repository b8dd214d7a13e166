"""Protocol buffers as they are written down: the fields of a message, without a schema."""

from collections.abc import Iterator
from typing import Any


class UnreadableError(ValueError):
    """What was read is no protocol buffer of the expected format. The message is one line."""


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a message's fields: integers, or bytes of what is nested or a string.

    Raises:
        UnreadableError: it ends too early, or has a field of another kind.
    """
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, position = _varint(message, position)
        elif wire in (1, 2, 5):
            length = {1: 8, 5: 4}.get(wire, 0)
            if not length:
                length, position = _varint(message, position)
            value, position = message[position : position + length], position + length
        else:
            raise UnreadableError(f"a field of wire type {wire}")
        yield number, value


def integers(packed: bytes) -> list[int]:
    """A repeated integer."""
    found, position = [], 0
    while position < len(packed):
        value, position = _varint(packed, position)
        found.append(value)
    return found


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(message):
            raise UnreadableError("a message that ends in the middle of a number")
        byte = message[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
