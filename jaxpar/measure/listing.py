"""The collective instructions of a compiled step one by one, each with the lines of jaxpar that caused it."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec.structs import replace

from compare.pipeline.instructions import Instruction, SourceLine
from jaxpar.measure.hlo import Collective, collectives
from jaxpar.measure.ledger import axis_of, inferred_purpose

PACKAGE = Path(__file__).parents[1]
DEEP = 16
"""Lines of a stack that are kept: below them is what starts any step."""
SHOWN = 3
"""Arrays of a joined collective that are written out; more are counted."""
_ARRAY = re.compile(r"\b(?:[a-z]+\d+[a-z0-9]*|pred)\[[\d,]*\]")
_OPERATION = re.compile(r"(?<=[\])}] )([a-z][\w\-]*)\(")


def listing(hlo: str, axis_sizes: Mapping[str, int]) -> list[Instruction]:
    """Every collective over more than one device; those that are alike are one, with their calls added up.

    What cannot be read is left out: the ledger says so.

    Args:
        hlo: `compiled.as_text()`.
        axis_sizes: mesh axes with their sizes, in the order of the mesh.
    """
    calls: Counter[Instruction] = Counter()
    for collective in collectives(hlo, axis_sizes, problems=[]):
        axis, group_size = axis_of(collective, axis_sizes)
        if group_size > 1:
            calls[_once(collective, axis)] += collective.calls
    return [replace(one, calls=times, bytes=times * one.bytes) for one, times in calls.items()]


def _once(collective: Collective, axis: str) -> Instruction:
    """One call of it."""
    operation = _OPERATION.search(collective.text)
    return Instruction(
        kind=collective.kind,
        axis=axis,
        purpose=collective.purpose or inferred_purpose(collective, axis),
        operation=operation[1] if operation else "",
        result=_result(collective.text[: operation.start()] if operation else ""),
        groups="{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in collective.groups) + "}",
        op_name=collective.op_name,
        calls=1,
        bytes=sum(collective.arrays),
        stack=_own(collective.stack),
    )


def _own(stack: Iterable[SourceLine]) -> tuple[SourceLine, ...]:
    """The lines of this package, each once: JAX repeats some where it traces a function within another."""
    lines = (
        replace(line, file=Path(line.file).relative_to(PACKAGE.parent).as_posix())
        for line in stack
        if Path(line.file).is_relative_to(PACKAGE)
    )
    return tuple(dict.fromkeys(lines))[:DEEP]


def _result(text: str) -> str:
    arrays = _ARRAY.findall(text)
    more = f" and {len(arrays) - SHOWN} more" if len(arrays) > SHOWN else ""
    return ", ".join(arrays[:SHOWN]) + more
