"""Where the instructions of a compiled module stand: the loop around each, and the turn that it runs in.

A loop says nothing when it begins a turn. But what stands directly in its body runs once a turn, in order: so
the turn of anything in the loop follows from how often the instruction of the body that it belongs to, itself
or a `while`, `conditional` or `call` around it, has begun on that device before.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from jaxpar.measure.hlo import OP_NAME, TRIP_COUNT, called_by, computations, opcode_of
from jaxpar.measure.profile_events import Execution

CONTROL = ("while", "conditional", "call", "async-start", "async-done")
"""Run other instructions, which have times of their own."""


class NestedInstruction(NamedTuple):
    """An instruction and its position in the module."""

    opcode: str
    op_name: str
    """Name of the JAX operation that it comes from; "" for XLA's own."""
    loop: str = ""
    """The outermost `while` around it whose number of turns XLA tells; "" if there is none."""
    trips: int = 0
    """Its turns."""
    marker: str = ""
    """The instruction of that loop's body that it belongs to, which runs once a turn."""


def places(hlo: str) -> dict[str, NestedInstruction]:
    """Nesting of every instruction that a module runs by itself, by name.

    Args:
        hlo: `compiled.as_text()`.
    """
    bodies, entry = computations(hlo)
    return dict(_walk(bodies, entry, NestedInstruction("", "")))


def _walk(
    bodies: Mapping[str, list[str]], computation: str, around: NestedInstruction
) -> Iterator[tuple[str, NestedInstruction]]:
    for text in bodies[computation]:
        name, opcode, made_of = text.partition(" ")[0], opcode_of(text), OP_NAME.search(text)
        place = around._replace(opcode=opcode, op_name=made_of[1] if made_of else "")
        if around.loop and not around.marker:
            place = place._replace(marker=name)
        yield name, place
        if opcode in CONTROL:
            inside = place
            if opcode == "while" and not place.loop and (trips := TRIP_COUNT.search(text)):
                inside = place._replace(loop=name, trips=int(trips[1]))
            for other in called_by(text):
                yield from _walk(bodies, other, inside)


class Turns:
    """The turn of the outermost loop in which an event was.

    Args:
        events: all of one run of the module.
        places: of its instructions.
    """

    def __init__(self, events: Iterable[Execution], places: Mapping[str, NestedInstruction]):
        self._places = places
        self._begins: dict[tuple[int, str], list[float]] = defaultdict(list)
        markers = {place.marker for place in places.values()}
        for event in sorted(events, key=lambda event: event.begin_us):
            if event.name in markers:
                self._begins[event.device, event.name].append(event.begin_us)

    def of(self, event: Execution) -> int:
        """Counted from 0; -1 outside of loops, or where the loop's turns are not what XLA says of them."""
        place = self._places[event.name]
        begins = self._begins[event.device, place.marker]
        if not place.loop or len(begins) != place.trips:
            return -1
        return bisect_right(begins, event.begin_us) - 1
