"""Instructions in the text of an optimised HLO module, `compiled.as_text()`.

`jaxpar.measure.hlo_collectives` finds the collectives among them.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+ = .*)$")
_OPCODE = re.compile(r"(?<=[\])}] )([a-z][\w\-]*)\(")
_CALLED = re.compile(
    r"(?:body|calls|to_apply|branch_computations|true_computation|false_computation|called_computations)="
    r"(?:\{([^}]*)\}|(%?[\w.\-]+))"
)
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=@?mesh\[([^\]]*)\]([^{]*)\{([^}]*)\}")
_DEVICE_IDS = re.compile(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)|device_ids=\(([\d,]+)\)")
_NAMES = re.compile(r"%([\w.\-]+)")
OP_NAME = re.compile(r'op_name="([^"]*)"')
AGAIN = "rematted_computation"
"""The scope of `jax.checkpoint` for operations that backward computes again."""
_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d+ .*\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^(\d+) (.*)$", re.MULTILINE)
_NUMBER = re.compile(r"(\w+)=(\d+)")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
WRAPPERS = Path(__file__).parents[1] / "comm"
"""All collectives of jaxpar are called in this folder; a ledger shows their callers."""
Groups = tuple[tuple[int, ...], ...]


class SourceLine(NamedTuple):
    """A line of a source file."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        """file.py:12 (function), without folders."""
        where = f"{self.file.rpartition('/')[2]}:{self.line}"
        return f"{where} ({self.function})" if self.function else where


def computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """The instructions `name = ...` of each computation by name, and the name of the entry."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            name = header[2]
            bodies[name] = []
            entry = name if header[1] else entry
        elif name and (instruction := _INSTRUCTION.match(line)):
            bodies[name].append(instruction[1])
    return bodies, entry


def name_of(text: str) -> str:
    """The name of an instruction, unique in its module."""
    return text.partition(" ")[0]


def operands(text: str) -> list[str]:
    """Names of the operands of an instruction."""
    _, _, after = text.partition(f" {opcode_of(text)}(")
    return _NAMES.findall(after.partition(")")[0])


def source_of(lines: Sequence[str], name: str) -> str:
    """The instruction that makes a value, before its copies; "" if it is not among the instructions."""
    text = next((line for line in lines if name_of(line) == name), "")
    return source_of(lines, *operands(text)) if opcode_of(text) in ("copy", "bitcast") else text


def opcode_of(text: str) -> str:
    """The operation of an instruction, such as `all-reduce`, `fusion` or `while`; "" if unreadable."""
    match = _OPCODE.search(text)
    return match[1] if match else ""


def called_by(text: str) -> list[str]:
    """Names of the computations that an instruction runs."""
    targets = (listed or name for listed, name in _CALLED.findall(text))
    return [name.strip().lstrip("%") for target in targets for name in target.split(",")]


def replica_groups(text: str, axis_sizes: Mapping[str, int]) -> Groups:
    """{{0,1},{2,3}}, [2,2]<=[4], mesh['x'=2,'y'=2] {'x'}, or a permute's pairs: positions in the mesh."""
    if match := _LISTED.search(text):
        groups = re.findall(r"\{([\d,]+)\}", match[1])
        everyone = tuple(range(math.prod(axis_sizes.values())))
        return tuple(tuple(map(int, group.split(","))) for group in groups) or (everyone,)
    if match := _IOTA.search(text):
        ids = _transposed(match[2], match[3]).reshape(_numbers(match[1]))
        return tuple(tuple(row) for row in ids.tolist())
    if match := _NAMED.search(text):
        sizes = {name: int(size) for name, size in re.findall(r"'?([\w]+)'?=(\d+)", match[1])}
        order = _DEVICE_IDS.search(match[2])  # XLA may reorder the devices of a mesh
        ids = order and (np.array(_numbers(order[3])) if order[3] else _transposed(order[1], order[2]))
        return groups_along(tuple(re.findall(r"\w+", match[3])), sizes, ids)
    return ()


def groups_along(
    axes: tuple[str, ...], axis_sizes: Mapping[str, int], ids: np.ndarray | None = None
) -> Groups:
    """Groups of devices that differ only along `axes`. `ids` are device numbers, by default in order."""
    ids = np.arange(math.prod(axis_sizes.values())) if ids is None else ids
    ids = ids.reshape(tuple(axis_sizes.values()))
    last = [list(axis_sizes).index(axis) for axis in axes]
    rows = np.moveaxis(ids, last, range(-len(axes), 0)).reshape(-1, math.prod(axis_sizes[a] for a in axes))
    return tuple(tuple(row) for row in rows.tolist())


def _transposed(shape: str, dims: str | None) -> np.ndarray:
    ids = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return ids.transpose(_numbers(dims)) if dims else ids


def _numbers(text: str, separator: str = ",") -> tuple[int, ...]:
    return tuple(map(int, text.split(separator)))


class SourceLines:
    """Source lines of a module's instructions, from the tables of stack frames in its text.

        FileNames              1 "model.py"
        FunctionNames          1 "loss"
        FileLocations          1 {file_name_id=1 function_name_id=1 line=5 ...}
        StackFrames            1 {file_location_id=1 parent_frame_id=1}

    The parent of a frame has the number `parent_frame_id` - 1; 0 means no parent.
    """

    def __init__(self, hlo: str):
        tables = defaultdict(dict, {name: dict(_ENTRY.findall(body)) for name, body in _TABLE.findall(hlo)})
        self._lines: dict[str, SourceLine] = {}
        for number, text in tables["FileLocations"].items():
            of = dict(_NUMBER.findall(text))
            file = tables["FileNames"].get(of["file_name_id"], "").strip('"')
            function = tables["FunctionNames"].get(of["function_name_id"], "").strip('"')
            self._lines[number] = SourceLine(file, int(of["line"]), function)
        self._frames = {number: dict(_NUMBER.findall(text)) for number, text in tables["StackFrames"].items()}

    def stack(self, instruction: str) -> list[SourceLine]:
        """The line of an instruction and its callers, the innermost first, without jaxpar's wrappers."""
        match, lines = _FRAME.search(instruction), []
        frame = match[1] if match else ""
        while (entry := self._frames.get(frame)) and len(lines) < len(self._frames):
            lines.append(self._lines[entry["file_location_id"]])
            frame = str(int(entry.get("parent_frame_id", "1")) - 1)
        return [line for line in lines if Path(line.file).parent != WRAPPERS] or lines
