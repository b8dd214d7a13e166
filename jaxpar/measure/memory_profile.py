"""Memory of a compiled step by class, from XLA's buffer assignment and the names of its instructions.

    parameters, optimizer   entry parameters, by their path in the step's arguments
    gradients               what backward makes, and the norm, a collective or the update reads
    gathered parameters     what an all-gather of parameters makes
    activations             temporaries from forward on, which backward reads
    logits                  arrays of the scope `head_loss` with a dim of the vocabulary
    communication buffers   what other collectives make
    temporaries             all else, the batch and scalars among it

XLA's schedule is one list, loops written out once, with little regard to phases: they are parted where fewest
instructions of autodiff's forward, of its transposition and of neither are on the wrong side. What XLA puts
into memory of parameters that it may overwrite counts as parameters.
"""

import re
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from compare.contract.communication import PARAMETERS
from compare.contract.memory_profile import (
    CLASSES,
    Class,
    DeviceMemory,
    Lifetime,
    Mark,
    MemoryProfile,
    Phase,
    curve_of,
    peak_of,
    peak_position,
    usage,
)
from jaxpar.measure.buffers import Assignment, Buffer, Instruction, read_assignment
from jaxpar.measure.source_lines import SourceLines
from jaxpar.measure.wire import UnreadableError
from jaxpar.model import HEAD

_COLLECTIVES = ("all-reduce", "reduce-scatter", "collective-permute", "all-to-all", "all-gather")
_ARGUMENTS: dict[str, Class] = {"params": "parameters", "opt_state": "optimizer"}
_ARGUMENT = re.compile(r"\w+")
METHOD = (
    "XLA's buffer assignment of the step: each buffer from the instruction that makes it to its last use, in "
    "the order of XLA's schedule, loops written out once; kernels' scratch memory is not seen"
)


def memory_profile(
    step: jax.stages.Compiled, *, planned: int, vocab: Iterable[int], width: int
) -> MemoryProfile | None:
    """The memory of a step on each device, which run one program.

    Args:
        step: compiled.
        planned: bytes that XLA sets aside for it.
        vocab: sizes that a dim of the vocabulary has on a device.
        width: of the token table.

    Returns:
        None if XLA does not tell, as on some platforms, or writes it down in another way: a training that has
        ended is not lost for that.
    """
    try:
        return _profile(step, read_assignment(step), planned=planned, vocab=vocab, width=width)
    except (UnreadableError, LookupError, TypeError):
        return None


def _profile(
    step: jax.stages.Compiled, assignment: Assignment, *, planned: int, vocab: Iterable[int], width: int
) -> MemoryProfile:
    program = _Program(assignment, vocab, width)
    in_use = program.in_use()
    instruction = assignment.schedule[peak_position(in_use)]
    place = (_line_of(instruction, step.as_text() or ""), instruction.op_name)
    peak = peak_of(
        in_use,
        program.marks,
        operation=f"{instruction.opcode} {instruction.name}",
        place=": ".join(filter(None, place)),
    )
    return MemoryProfile(
        devices=[DeviceMemory(peak=peak, curve=curve_of(in_use, program.marks))],
        method=METHOD,
        planned_bytes=planned,
    )


class _Program:
    """A module's schedule, cut into phases, and what its buffers are for."""

    def __init__(self, assignment: Assignment, vocab: Iterable[int], width: int):
        self._assignment, self._vocab, self._width = assignment, set(vocab), width
        self._length = len(assignment.schedule)
        made_by = [_phase(one) for one in assignment.schedule]
        self._update = _split(made_by, ("forward", "backward"), ("update",))
        self._backward = _split(made_by[: self._update], ("forward",), ("backward",))
        self.marks = [Mark(0, "forward"), Mark(self._backward, "backward"), Mark(self._update, "update")]

    def in_use(self) -> dict[Class, np.ndarray]:
        """Bytes at each position of the schedule, by class."""
        fixed = usage(
            (
                Lifetime(self._argument(one.parameter), one.size, 0, self._length)
                for one in self._assignment.fixed
            ),
            self._length,
        )
        for allocation in {one.allocation for one in self._assignment.buffers}:
            inside = [one for one in self._assignment.buffers if one.allocation == allocation]
            for kind, series in self._of_allocation(inside).items():
                fixed[kind] = fixed[kind] + series
        return fixed

    def kind(self, buffer: Buffer) -> Class:
        """What a temporary is for."""
        made_by = buffer.instruction
        if made_by.opcode.startswith("all-gather") and not self._is_of_activations(made_by):
            return "gathered parameters"
        if made_by.is_constant:
            return "temporaries"  # what is added to zeros lies on them, and has a class of its own
        if self._reaches_update(buffer):
            return "gradients"
        if HEAD in made_by.op_name and self._are_logits(made_by.dims(buffer.index)):
            return "logits"
        if buffer.begin < self._backward < buffer.end:
            return "activations"
        return "communication buffers" if made_by.opcode.startswith(_COLLECTIVES) else "temporaries"

    def _reaches_update(self, buffer: Buffer) -> bool:
        """Whether backward made it, and something beyond backward reads it, or its loop adds to it."""
        is_read = any(_phase(reader) == "update" for reader in buffer.readers)
        is_made = _phase(buffer.instruction) == "backward" and buffer.begin < self._update
        is_added_to = is_made and buffer.begin < self._backward  # in backward's loop, from zeros on
        return (is_made and is_read) or is_added_to or buffer.begin < self._update < buffer.end

    def _of_allocation(self, buffers: list[Buffer]) -> dict[Class, np.ndarray]:
        """Bytes of an allocation that are in use: where buffers lie on each other, the first class counts."""
        edges = np.unique([edge for one in buffers for edge in (one.offset, one.offset + one.size)])
        owner = np.full((len(edges), self._length), len(CLASSES), np.int8)
        coded = [(CLASSES.index(self.kind(one)), one) for one in buffers]
        for code, one in sorted(coded, key=lambda pair: -pair[0]):
            rows = slice(*np.searchsorted(edges, (one.offset, one.offset + one.size)))
            owner[rows, one.begin : one.end] = code
        sizes = np.append(np.diff(edges), 0)
        return {kind: sizes @ (owner == code) for code, kind in enumerate(CLASSES)}

    def _argument(self, parameter: int) -> Class:
        """The class of an entry parameter, by its path in the step's arguments."""
        instruction = self._assignment.parameters.get(parameter)
        found = _ARGUMENT.match(instruction.op_name) if instruction else None
        return _ARGUMENTS.get(found[0], "temporaries") if found else "temporaries"

    def _is_of_activations(self, instruction: Instruction) -> bool:
        return "for_" in instruction.op_name and f"for_{PARAMETERS}" not in instruction.op_name

    def _are_logits(self, dims: list[int]) -> bool:
        """Whether sizes are of (..., V) and not of the token table, its copy or gradient."""
        is_table = len(dims) == 2 and self._width in dims
        return len(dims) > 1 and not is_table and bool(self._vocab & set(dims))


def _phase(instruction: Instruction) -> Phase | None:
    """Which part of the program it computes; None for what XLA may compute at any time."""
    op_name = instruction.op_name
    if not op_name or instruction.is_constant or instruction.opcode == "parameter":
        return None
    if "transpose(" in op_name:
        return "backward"  # a forward that is computed anew, too
    return "forward" if "jvp(" in op_name else "update"


def _split(phases: Sequence[Phase | None], before: Sequence[Phase], after: Sequence[Phase]) -> int:
    """Split index with the fewest misplaced instructions: XLA interleaves the two phases."""
    steps = np.array([(phase in before) * 1 - (phase in after) * 1 for phase in phases])
    return int(np.argmax(np.concatenate([[0], steps.cumsum()])))


def _line_of(instruction: Instruction, hlo: str) -> str:
    """The line of the program that it is of, if the module's text tells."""
    found = re.search(rf"^.*%?{re.escape(instruction.name)} = .*$", hlo, re.MULTILINE)
    return str(SourceLines(hlo).of(found[0]) or "") if found else ""
