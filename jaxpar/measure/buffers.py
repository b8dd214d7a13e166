"""XLA's buffer assignment of a compiled program: which buffers there are, where, and when each is in use.

    allocation   memory of one size; entry parameters and outputs have theirs for the whole program, and one
                 or a few large ones hold all temporaries
    buffer       a value at a place in an allocation: from where it is made to its last use, in the order of
                 the schedule. Several may lie on each other: one after the other, or as names of one value

Read from two protocol buffers (xla/service/hlo.proto): the assignment and the scheduled module.
"""

from dataclasses import dataclass, field
from typing import Any

import jax

from jaxpar.measure.wire import UnreadableError, fields, integers

_CALLERS = ("while", "call", "conditional")
"""Instructions whose computations are written out in the schedule."""


@dataclass
class Instruction:
    """One instruction; `position` in the schedule, in which loops are written out once, or -1.

    It is constant if it is made of constants alone: XLA may compute it at any time.
    """

    name: str
    opcode: str
    op_name: str
    shape: bytes
    operands: list[int]
    called: list[int]
    tuple_index: int
    position: int = -1
    is_constant: bool = False

    def dims(self, index: tuple[int, ...]) -> list[int]:
        """Sizes of its result, or of a part of it, if that is a tuple."""
        shape = self.shape
        for step in index:
            shape = [value for number, value in fields(shape) if number == 4][step]
        return integers(dict(fields(shape)).get(3, b""))


@dataclass(frozen=True)
class Allocation:
    """Memory that is there during the whole program; `parameter` is the entry's, or -1."""

    size: int
    parameter: int = -1


@dataclass
class Buffer:
    """A temporary: `size` bytes at `offset` of an allocation, in use from `begin` to before `end`.

    Its readers are the instructions that do more with it than to give it another name.
    """

    instruction: Instruction
    index: tuple[int, ...]
    allocation: int
    offset: int
    size: int
    begin: int = 0
    end: int = 0
    readers: list[Instruction] = field(default_factory=list)


@dataclass(frozen=True)
class Assignment:
    """Memory of a compiled program on one device.

    Attributes:
        fixed: parameters and outputs.
        buffers: temporaries.
        schedule: all instructions in order.
        parameters: the entry's, by number.
    """

    fixed: list[Allocation]
    buffers: list[Buffer]
    schedule: list[Instruction]
    parameters: dict[int, Instruction]


def read_assignment(step: jax.stages.Compiled) -> Assignment:
    """The buffer assignment of a compiled function. UnreadableError if XLA gives none that can be read."""
    serialized = getattr(step.memory_analysis(), "serialized_buffer_assignment_proto", b"")
    executable = step.runtime_executable()
    if not serialized or executable is None:
        raise UnreadableError("XLA gives no buffer assignment of this program")
    module = _Module(executable.hlo_modules()[0].as_serialized_hlo_module_proto())
    if not module.schedule:
        raise UnreadableError("XLA gives no schedule of this program")
    defined, places = _locations(serialized)
    fixed, buffers = [], []
    for allocation in (value for number, value in fields(serialized) if number == 3):
        found: dict[int, Any] = dict(fields(allocation))
        if found.get(3) or found.get(12):
            continue  # of one thread, or a constant of the program's own
        if found.get(5) or found.get(7):
            fixed.append(Allocation(found.get(2, 0), found.get(6, 0) if found.get(5) else -1))
            continue
        for assigned in (dict(fields(value)) for number, value in fields(allocation) if number == 9):
            number = assigned.get(1, 0)
            instruction, index = module.instructions[defined[number][0]], defined[number][1]
            at = (found.get(1, 0), assigned.get(2, 0), assigned.get(3, 0))
            buffer = Buffer(instruction, index, *at)
            locations = [defined[number], *places.get(number, [])]
            buffer.begin, buffer.end = module.range_of(locations)
            buffer.readers = module.readers_of(locations)
            buffers.append(buffer)
    return Assignment(fixed, buffers, module.schedule, module.parameters)


Location = tuple[int, tuple[int, ...]]  # an instruction, and a part of its result


def _locations(serialized: bytes) -> tuple[dict[int, Location], dict[int, list[Location]]]:
    """By buffer: where it is defined, and where else it is to be found."""
    defined: dict[int, Location] = {}
    places: dict[int, list[Location]] = {}
    for number, value in fields(serialized):
        found: dict[int, Any] = dict(fields(value)) if number in (1, 2) else {}
        if number == 1:
            defined[found.get(1, 0)] = _location(found[3])
        elif number == 2:
            places.setdefault(found.get(1, 0), []).append(_location(found[2]))
    return defined, places


def _location(message: bytes) -> Location:
    found = dict(fields(message))
    return found[4], tuple(integers(found.get(3, b"")))


@dataclass
class _Module:
    """The instructions of a module, in the order of its schedule."""

    serialized: bytes
    instructions: dict[int, Instruction] = field(default_factory=dict)
    schedule: list[Instruction] = field(default_factory=list)
    parameters: dict[int, Instruction] = field(default_factory=dict)

    def __post_init__(self):
        of_module = list(fields(self.serialized))
        self._roots: dict[int, int] = {}
        for computation in (value for number, value in of_module if number == 3):
            self._read_computation(computation)
        self._readers: dict[Location, set[int]] = {}
        self._users: dict[int, list[int]] = {}
        for number, instruction in self.instructions.items():
            for operand in instruction.operands:
                self._users.setdefault(operand, []).append(number)
        orders: dict[int, list[int]] = {}
        for schedule in (value for number, value in of_module if number == 7):
            for entry in (dict(fields(value)) for number, value in fields(schedule) if number == 1):
                orders[entry[1]] = integers(dict(fields(entry.get(2, b""))).get(1, b""))
        entry = dict(of_module)[6]
        self._end_of: dict[int, int] = {}  # of a root: where its computation ends
        self._write_out(entry, orders)
        self._end_of[self._roots[entry]] = len(self.schedule) - 1
        for number, instruction in self._entry_parameters(orders.get(entry, [])):
            self.parameters[number] = instruction

    def range_of(self, locations: list[Location]) -> tuple[int, int]:
        """From the first place of a buffer to behind its last use."""
        here = [place for place in locations if self.instructions[place[0]].position >= 0]
        begin = min((self.instructions[number].position for number, _ in here), default=0)
        ends = [self.instructions[number].position for number, _ in here]
        ends += [self._end_of[number] for number, _ in here if number in self._end_of]
        ends += [reader.position for reader in self.readers_of(here)]
        return begin, 1 + max(ends, default=-1)

    def readers_of(self, locations: list[Location]) -> list[Instruction]:
        """Who reads a buffer, and roots that end with it, whatever name it has there."""
        found = {number: None for location in locations for number in self._read_by(*location)}
        return [self.instructions[number] for number in found]

    def _read_by(self, number: int, index: tuple[int, ...]) -> set[int]:
        if (number, index) not in self._readers:
            found: set[int] = set()
            for user in self._users.get(number, []):
                found |= self._followed(user, number, index)
            self._readers[number, index] = found
        return self._readers[number, index]

    def _followed(self, user: int, operand: int, index: tuple[int, ...]) -> set[int]:
        """A reader of a part of its operand; of one that only names it anew, the readers of that."""
        instruction = self.instructions[user]
        if instruction.opcode == "get-tuple-element" and index:
            return self._read_by(user, index[1:]) if instruction.tuple_index == index[0] else set()
        if instruction.opcode == "bitcast":
            return self._read_by(user, index)
        if instruction.opcode == "tuple":
            slots = [slot for slot, given in enumerate(instruction.operands) if given == operand]
            return set().union(*(self._read_by(user, (slot, *index)) for slot in slots))
        return {user}

    def _read_computation(self, computation: bytes) -> None:
        of_computation = list(fields(computation))
        self._roots[dict(of_computation)[5]] = dict(of_computation).get(6, 0)
        for number, value in of_computation:
            if number == 2:
                found: dict[int, Any] = dict(fields(value))
                self.instructions[found[35]] = Instruction(
                    name=found[1].decode(),
                    opcode=found[2].decode(),
                    op_name=dict(fields(found.get(7, b""))).get(2, b"").decode(),
                    shape=found.get(3, b""),
                    operands=integers(found.get(36, b"")),
                    called=integers(found.get(38, b"")),
                    tuple_index=found.get(13, 0),
                )
                if found[2] == b"parameter":
                    self.instructions[found[35]].tuple_index = found.get(9, 0)

    def _write_out(self, computation: int, orders: dict[int, list[int]]) -> None:
        for number in orders.get(computation, []):
            instruction = self.instructions[number]
            if instruction.opcode in _CALLERS:
                for called in instruction.called:
                    self._write_out(called, orders)
                    self._end_of[self._roots[called]] = len(self.schedule)
            instruction.position = len(self.schedule)
            instruction.is_constant = instruction.opcode != "parameter" and all(
                self.instructions[operand].is_constant for operand in instruction.operands
            )
            self.schedule.append(instruction)

    def _entry_parameters(self, order: list[int]) -> list[tuple[int, Instruction]]:
        found = (self.instructions[number] for number in order)
        return [(one.tuple_index, one) for one in found if one.opcode == "parameter"]
