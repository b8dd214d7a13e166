"""Collective instructions in the text of an optimised HLO module, `compiled.as_text()`.

The number of calls is static and exact. Trip counts of loops multiply; the condition of a loop runs once more
than its body. A branch that runs in N of M iterations has a scope `runs_N_of_M`
(`comm.collectives.run_if`). Other branches are counted if all branches send equal messages.

XLA:TPU writes no trip count. A loop counts if its counter provably goes from a constant to a constant.
XLA:TPU divides an asynchronous collective into a chain of fusions: a start, steps inside other kernels, and
an end. Each has a copy of the collective. A reduce-scatter is a fusion of an all-reduce and slices.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from compare.contract.communication import OF_DERIVATIVE, PHASES

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}
COMMUNICATES = ("all-", "reduce-scatter", "collective-", "ragged-all-to-all", "send", "recv")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+ = .*)$")
_OPCODE = re.compile(r"(?<=[\])}] )([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+\d+[a-z0-9]*|pred)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:body|calls|to_apply|branch_computations|true_computation|false_computation|called_computations)="
    r"(?:\{([^}]*)\}|(%?[\w.\-]+))"
)
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_ON_HOST = "is_host_transfer=true"
_HIDDEN = re.compile(
    r'custom_call_target="[^"]*(?:nvshmem|nccl|all_?reduce|all_?gather|all_?to_?all)', re.IGNORECASE
)
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=@?mesh\[([^\]]*)\]([^{]*)\{([^}]*)\}")
_DEVICE_IDS = re.compile(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)|device_ids=\(([\d,]+)\)")
_ROOT = re.compile(r"^\s*ROOT %?([\w.\-]+) =", re.MULTILINE)
_NAMES = re.compile(r"%([\w.\-]+)")
_CONSTANT = re.compile(r" [su]\d+\[\]\S* constant\((-?\d+)\)")
_INDEX = re.compile(r" get-tuple-element\(%[\w.\-]+\), index=(\d+)")
_CHAIN = re.compile(r'channel_id=(\d+).*\bchain_id="(\d+)"')
_START, _END = "AsyncCollectiveStart", "AsyncCollectiveDone"
_PART = "async-collective-"
"""Begins the names of a chain's start and end, which compute nothing."""
_SCATTER = re.compile(r'"emitter":"\w*AllReduceScatterFusion"')
_EMITTER = re.compile(r'"collective_algorithm_config":\{"emitter":"(\w+)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_SYNCHRONOUS = '"is_sync":true'
_KERNELS = ("fusion", "custom-call", "dot", "convolution", "reduce", "sort", "scatter", "while", "call")
"""Operations that compute during an asynchronous collective."""
TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_TURNS = re.compile(r"\bruns_(\d+(?:_\d+)*)_of_(\d+)\b")
OP_NAME = re.compile(r'op_name="([^"]*)"')
AGAIN = "rematted_computation"
"""The scope of `jax.checkpoint` for operations that backward computes again."""
# The scopes of `comm.collectives.ledger_scope`.
_PURPOSE = re.compile(rf"\bfor_({'|'.join(purpose.replace(' ', '_') for purpose in PHASES)})(_by_hand)?\b")
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


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective instruction.

    Attributes:
        arrays: bytes of each array that it sends, full (gathered) size.
        op_name: scopes and transforms of its operation in JAX.
        stack: source lines, the innermost first; () if the module has none.
        text: the instruction in the module, which begins with its name.
        calls: calls in one step, for each rank of a pipeline, or one number for all devices.
        loops: trip counts of the loops around it, the outermost first.
        is_async: True if the program may compute between its start and its end.
        overlapped: the operations between its start and its end, one for each kernel.
        cycles: XLA:TPU's estimate of their cycles in one call; 0 on other platforms.
        algorithm: XLA:TPU's name of its algorithm, or "".
    """

    kind: str
    groups: Groups
    arrays: tuple[int, ...]
    dtypes: tuple[str, ...]
    op_name: str
    stack: tuple[SourceLine, ...]
    text: str
    calls: tuple[int, ...] = (1,)
    loops: tuple[int, ...] = ()
    is_async: bool = False
    overlapped: tuple[str, ...] = ()
    cycles: int = 0
    algorithm: str = ""

    @property
    def name(self) -> str:
        """The name of the instruction, unique in its module."""
        return name_of(self.text)

    @property
    def backward(self) -> bool:
        """True for a derivative; False for a forward that backward computes again."""
        return "transpose(" in self.op_name and AGAIN not in self.op_name

    @property
    def purpose(self) -> str:
        """The purpose of the innermost scope `for_PURPOSE`, or of its derivative; "" without a scope."""
        scope, by_hand = (_PURPOSE.findall(self.op_name) or [("", "")])[-1]
        purpose = scope.replace("_", " ")
        return OF_DERIVATIVE.get(purpose, purpose) if self.backward and not by_hand else purpose

    @property
    def turns(self) -> tuple[tuple[int, ...], int]:
        """N and M of the scope `runs_N_of_M`, N by pipeline rank; 1 and 1 without a scope."""
        turns, of = (_TURNS.findall(self.op_name) or [("1", "1")])[-1]
        return _numbers(turns, "_"), int(of)

    def calls_at(self, rank: int) -> int:
        """Calls in one step on a pipeline rank."""
        return self.calls[rank % len(self.calls)]


def collectives(
    hlo: str, axis_sizes: Mapping[str, int], problems: list[str] | None = None
) -> list[Collective]:
    """Every collective instruction of a module, with its number of calls.

    `problems` receives a line for each instruction that cannot be counted. It is skipped, or counted once in
    a loop of unknown length.
    """
    module = _Module(hlo, axis_sizes, [] if problems is None else problems)
    return [module.at_its_turns(collective) for collective in module.walk(module.entry)]


class _Module:
    """The text of a module, split into computations."""

    def __init__(self, hlo: str, axis_sizes: Mapping[str, int], problems: list[str]):
        self._computations, self.entry = computations(hlo)
        self._axis_sizes, self._problems, self._sources = axis_sizes, problems, SourceLines(hlo)
        self._roots = {*_ROOT.findall(hlo)}
        self._started: set[tuple[str, ...]] = set()
        """Channel and chain of each asynchronous collective of XLA:TPU that began."""

    def walk(self, name: str) -> Iterator[Collective]:
        """The collectives of a computation and of the computations that it calls."""
        lines = self._computations[name]
        for place, text in enumerate(lines):
            opcode, after = opcode_of(text), lines[place + 1 :]
            if opcode.removesuffix("-start") in KINDS:
                yield from self._collective(text, after=after)
            elif opcode == "async-start":
                how = self._between(text, after)
                yield from (replace(found, **how) for other in called_by(text) for found in self.walk(other))
            elif opcode == "fusion" and (inner := self._fused(text)):
                for found in inner:
                    yield from self._in_fusion(found, text, after)
            elif opcode.endswith("-done"):
                continue  # its start is counted
            elif opcode.startswith(COMMUNICATES) or _HIDDEN.search(text):
                if _ON_HOST not in text:
                    self._object(f"{opcode} is an operation that the ledger does not know", text)
            elif opcode == "while":
                yield from self._loop(text, lines)
            elif opcode == "conditional":
                yield from self._branches(text)
            else:
                for other in called_by(text):
                    yield from self.walk(other)

    def _collective(self, text: str, *, caller: str = "", after: Sequence[str] = ()) -> Iterator[Collective]:
        """The collective of an instruction, without the loops around it.

        `caller` is the fusion around it, if there is one, which may have its names. `after` are the
        instructions that follow.
        """
        groups = replica_groups(text, self._axis_sizes)
        if not groups:
            self._object("a collective whose replica groups cannot be read", text)
            return
        opcode = opcode_of(text)
        how = self._between(text, after) if opcode.endswith("-start") else {}
        named = text if OP_NAME.search(text) else caller or text
        emitter = _EMITTER.search(caller or text)
        found = _collective(text, opcode, groups, named, tuple(self._sources.stack(named)))
        yield replace(found, **how, algorithm=emitter[1] if emitter else "")

    def _fused(self, text: str) -> list[str]:
        """The collective instructions in the computations that a fusion calls."""
        return [
            inner
            for name in called_by(text)
            for inner in self._computations[name]
            if opcode_of(inner).removesuffix("-start") in KINDS
        ]

    def _in_fusion(self, inner: str, text: str, after: Sequence[str]) -> Iterator[Collective]:
        """The collective `inner` of a fusion of XLA:TPU; nothing for a later part of a chain."""
        body = [line for name in called_by(text) for line in self._computations[name]]
        if chain := _CHAIN.search(inner):
            if any(_START in line and f"(%{name_of(inner)}" in line for line in body):
                self._started.add(chain.groups())
                how = self._overlapped(after, lambda later: self._ends(later, chain.groups()))
                yield from (replace(found, **how) for found in self._collective(inner, caller=text))
            elif chain.groups() not in self._started:
                self._object("a part of an asynchronous collective that never starts", inner)
        elif _SCATTER.search(text) and any(opcode_of(line) == "dynamic-slice" for line in body):
            for found in self._collective(inner, caller=text):
                yield replace(found, kind="reduce_scatter")
        else:
            self._object("a collective in a fusion of an unknown form", inner)

    def _ends(self, text: str, chain: tuple[str, ...]) -> bool:
        """Whether a fusion is the end of a chain."""
        return opcode_of(text) == "fusion" and any(
            (found := _CHAIN.search(inner)) and found.groups() == chain
            for name in called_by(text)
            if any(_END in line for line in self._computations[name])
            for inner in self._computations[name]
        )

    def _between(self, start: str, after: Sequence[str]) -> dict[str, Any]:
        """`_overlapped` of a pair of start and done; {} if XLA:GPU runs the pair as one instruction."""
        if _SYNCHRONOUS in start:
            return {}
        name = name_of(start)
        return self._overlapped(
            after, lambda later: opcode_of(later).endswith("-done") and name in operands(later)
        )

    def _overlapped(self, after: Sequence[str], is_end: Callable[[str], bool]) -> dict[str, Any]:
        """Fields of an asynchronous collective: the kernels before its end, and their cycles."""
        overlapped, cycles = [], 0
        for place, text in enumerate(after):
            if is_end(text):
                return {"is_async": True, "overlapped": tuple(overlapped), "cycles": cycles}
            spent, opcode = self._cycles(text, after[:place]), opcode_of(text)
            if spent or (opcode in _KERNELS and _PART not in name_of(text)):
                match = OP_NAME.search(text)
                overlapped.append(match[1].rpartition("/")[2] if match else opcode)
                cycles += spent
        return {"is_async": True}

    def _cycles(self, text: str, lines: Sequence[str]) -> int:
        """XLA:TPU's estimate of the cycles of an instruction; of a loop, of all its turns."""
        if match := _CYCLES.search(text):
            return int(match[1])
        if opcode_of(text) not in ("while", "call"):
            return 0
        inner = [
            (line, self._computations[name]) for name in called_by(text) for line in self._computations[name]
        ]
        return (self._trips(text, lines) or 1) * sum(self._cycles(*item) for item in inner)

    def at_its_turns(self, collective: Collective) -> Collective:
        """The collective with its calls from the scope `runs_N_of_M`, if it has one."""
        (turns, of), (calls,) = collective.turns, collective.calls
        if of > 1 and of not in collective.loops:
            words = f"it is in a scope runs_N_of_{of}, and in no loop of that many iterations"
            self._object(words, collective.text)
            return collective
        return replace(collective, calls=tuple(calls * count // of for count in turns))

    def _loop(self, text: str, lines: Sequence[str]) -> Iterator[Collective]:
        """The collectives of a loop: of its body, and of its condition, which runs once more."""
        conditions = _CONDITION.findall(text)
        parts = [(name, 0) for name in called_by(text)] + [(name, 1) for name in conditions]
        sent = [(inner, more) for name, more in parts for inner in self.walk(name)]
        if not sent:
            return
        trips = self._trips(text, lines)
        if trips is None:
            trips = 1
            kinds = _kinds([inner for inner, _ in sent])
            self._object(f"a loop with a collective in it ({kinds}) has no known trip count", text)
        for inner, more in sent:
            turns = trips + more
            yield replace(inner, calls=(inner.calls[0] * turns,), loops=(turns, *inner.loops))

    def _trips(self, text: str, lines: Sequence[str]) -> int | None:
        """The trip count of a loop among the instructions of a computation; None if it is unknown.

        XLA writes it, or the condition compares a counter with a constant: the counter begins with a
        constant, and the body adds a constant.
        """
        if known := TRIP_COUNT.search(text):
            return int(known[1])
        condition, body = (self._computations[name] for name in (*_CONDITION.findall(text), *called_by(text)))
        test, after = self._root(condition), self._root(body)
        compared, begun, left = operands(test), _source(lines, *operands(text)), operands(after)
        if "direction=LT" not in test or opcode_of(begun) != "tuple" or opcode_of(after) != "tuple":
            return None
        counter, bound = (_source(condition, name) for name in compared)
        index = _INDEX.search(counter)
        if not index:
            return None
        place = int(index[1])
        step = _source(body, left[place])
        if opcode_of(step) != "add":
            return None
        before, added = (_source(body, name) for name in operands(step))
        again = _INDEX.search(before)
        first = _CONSTANT.search(_source(lines, operands(begun)[place]))
        last, by = _CONSTANT.search(bound), _CONSTANT.search(added)
        if not (first and last and by and again and again[1] == index[1] and int(by[1]) > 0):
            return None
        return max(-(-(int(last[1]) - int(first[1])) // int(by[1])), 0)

    def _root(self, lines: Sequence[str]) -> str:
        return next((line for line in lines if name_of(line) in self._roots), "")

    def _branches(self, text: str) -> Iterator[Collective]:
        """The collectives of branches that have a scope `runs_N_of_M`, and of the largest branch without."""
        unscoped: list[list[Collective]] = []
        for branch in ([*self.walk(name)] for name in called_by(text)):
            yield from (inner for inner in branch if inner.turns[1] > 1)
            unscoped.append([inner for inner in branch if inner.turns[1] == 1])
        alike = {tuple(sorted((c.kind, c.groups, c.arrays, c.calls) for c in branch)) for branch in unscoped}
        if len(alike) > 1:
            kinds = _kinds([inner for branch in unscoped for inner in branch])
            words = f"a branch with a collective in it ({kinds}), which counts as if it were always taken"
            self._object(words, text)
        yield from max(
            unscoped, key=lambda branch: sum(sum(c.arrays) * c.calls[0] for c in branch), default=[]
        )

    def _object(self, problem: str, text: str) -> None:
        self._problems.append(f"{problem}, at {(self._sources.stack(text) or [text[:120]])[0]}")


def _kinds(inner: list[Collective]) -> str:
    return ", ".join(sorted({collective.kind for collective in inner}))


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


def _source(lines: Sequence[str], name: str) -> str:
    """The instruction that makes a value, before its copies; "" if it is not among the instructions."""
    text = next((line for line in lines if name_of(line) == name), "")
    return _source(lines, *operands(text)) if opcode_of(text) in ("copy", "bitcast") else text


def opcode_of(text: str) -> str:
    """The operation of an instruction, such as `all-reduce`, `fusion` or `while`; "" if unreadable."""
    match = _OPCODE.search(text)
    return match[1] if match else ""


def called_by(text: str) -> list[str]:
    """Names of the computations that an instruction runs."""
    targets = (listed or name for listed, name in _CALLED.findall(text))
    return [name.strip().lstrip("%") for target in targets for name in target.split(",")]


def _collective(
    text: str, opcode: str, groups: Groups, named: str, stack: tuple[SourceLine, ...]
) -> Collective:
    """The collective of an instruction, without the loops around it. `named` has its scopes."""
    kind = KINDS[opcode.removesuffix("-start")]
    shapes = _ARRAY.findall(text[: text.index(f" {opcode}(")])
    if opcode == "collective-permute-start" and shapes[-2:] == [("u32", "")] * 2:
        shapes = shapes[:-2]  # context words after operands and results
    if opcode.endswith("-start") and opcode != "all-reduce-start":
        shapes = shapes[len(shapes) // 2 :]  # (operands, results)
    scattered = len(groups[0]) if kind == "reduce_scatter" else 1
    match = OP_NAME.search(named)
    return Collective(
        kind=kind,
        groups=groups,
        arrays=tuple(_bytes(dtype, dims) * scattered for dtype, dims in shapes),
        dtypes=tuple(dict.fromkeys(dtype for dtype, _ in shapes)),
        op_name=match[1] if match else "",
        stack=stack,
        text=text,
    )


def _bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return math.prod(map(int, filter(None, dims.split(",")))) * bits // 8


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
