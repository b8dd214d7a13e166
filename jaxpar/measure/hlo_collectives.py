"""Collective instructions of an optimised HLO module (`jaxpar.measure.hlo`), with their number of calls.

The number of calls is static and exact. Trip counts of loops multiply; the condition of a loop runs once more
than its body. A branch that runs in N of M iterations has a scope `runs_N_of_M`
(`comm.collectives.run_if`). Other branches are counted if all branches send equal messages.

XLA:TPU writes no trip count. A loop counts if its counter provably goes from a constant to a constant.
XLA:TPU divides an asynchronous collective into a chain of fusions: a start, steps inside other kernels, and
an end. Each has a copy of the collective. A reduce-scatter is a fusion of an all-reduce and slices.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compare.contract.communication import OF_DERIVATIVE, PHASES
from jaxpar.measure.hlo import (
    AGAIN,
    OP_NAME,
    Groups,
    SourceLine,
    SourceLines,
    called_by,
    computations,
    name_of,
    opcode_of,
    operands,
    replica_groups,
    source_of,
)

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
_ARRAY = re.compile(r"\b([a-z]+\d+[a-z0-9]*|pred)\[([\d,]*)\]")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_ON_HOST = "is_host_transfer=true"
_HIDDEN = re.compile(
    r'custom_call_target="[^"]*(?:nvshmem|nccl|all_?reduce|all_?gather|all_?to_?all)', re.IGNORECASE
)
_ROOT = re.compile(r"^\s*ROOT %?([\w.\-]+) =", re.MULTILINE)
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
# The scopes of `comm.collectives.ledger_scope`.
_PURPOSE = re.compile(rf"\bfor_({'|'.join(purpose.replace(' ', '_') for purpose in PHASES)})(_by_hand)?\b")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective instruction.

    Attributes:
        arrays: bytes of each array that it sends, full (gathered) size.
        scalars: bytes, of these, of arrays of one number.
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
    scalars: int = 0

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
        return tuple(map(int, turns.split("_"))), int(of)

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
        compared, begun, left = operands(test), source_of(lines, *operands(text)), operands(after)
        if "direction=LT" not in test or opcode_of(begun) != "tuple" or opcode_of(after) != "tuple":
            return None
        counter, bound = (source_of(condition, name) for name in compared)
        index = _INDEX.search(counter)
        if not index:
            return None
        place = int(index[1])
        step = source_of(body, left[place])
        if opcode_of(step) != "add":
            return None
        before, added = (source_of(body, name) for name in operands(step))
        again = _INDEX.search(before)
        first = _CONSTANT.search(source_of(lines, operands(begun)[place]))
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
    single = {"reduce_scatter": 0, "all_gather": len(groups[0])}.get(
        kind, 1
    )  # numbers, if each device gives one
    match = OP_NAME.search(named)
    return Collective(
        kind=kind,
        groups=groups,
        arrays=tuple(_bytes(dtype, dims) * scattered for dtype, dims in shapes),
        dtypes=tuple(dict.fromkeys(dtype for dtype, _ in shapes)),
        op_name=match[1] if match else "",
        stack=stack,
        text=text,
        scalars=sum(_bytes(dtype, dims) for dtype, dims in shapes if _count(dims) == single),
    )


def _bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
    return _count(dims) * bits // 8


def _count(dims: str) -> int:
    return math.prod(map(int, filter(None, dims.split(","))))
