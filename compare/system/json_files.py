"""JSON files of Structs: atomic writes, typed reads, and errors that name the file."""

import math
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from compare.system.disk import write_atomically
from compare.system.tensors import garbled

T = TypeVar("T")


def write_json(path: Path, value: object) -> None:
    """Write a Struct, or a list or dict of them, as indented JSON, atomically."""
    try:
        content = msgspec.json.encode(value)
    except UnicodeEncodeError:  # half a character, such as in the text of an error about a file's name
        content = msgspec.json.encode(_encodable(msgspec.to_builtins(value)))
    write_atomically(path, msgspec.json.format(content, indent=2) + b"\n")


def read_json(path: Path, type: type[T]) -> T:
    """Read a file of `write_json`. Raises RecordError for a missing file or another type."""
    try:
        return decode_json(path.read_bytes(), type)
    except (OSError, msgspec.DecodeError) as error:
        raise garbled(path, error) from None


def decode_json(content: str | bytes, type: type[T]) -> T:
    """Decode a Struct. null becomes NaN, because JSON cannot write a number that is not finite.

    The record of a diverged run then fails every comparison.
    """
    try:
        return msgspec.convert(_null_to_nan(msgspec.json.decode(content)), type, str_keys=True)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from None


def _encodable(value: Any) -> Any:
    """The value with a question mark for each half of a character."""
    if isinstance(value, dict):
        return {key: _encodable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(item) for item in value]
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def _null_to_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _null_to_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_null_to_nan(item) for item in value]
    return math.nan if value is None else value
