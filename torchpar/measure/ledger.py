"""The ledger of a context: every collective, with its place in the program.

    with torchpar.ledger() as ledger:
        loss(model(x)).backward()
    print(ledger)

A row of one of torchpar's collectives is the whole collective. On gloo a gather consists of sends. The
dispatcher reports these sends, and `of_all_ranks` compares their bytes with torchpar's own count. Calls in
other threads, and direct calls of a backend, are not recorded.
"""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from compare.contract import communication
from compare.contract.communication import PHASES, Communication, ring_wire_bytes
from compare.contract.ledger import WORLD, Ledger
from compare.spec.axes import CP, EP, PP, SHARDS, TP, parts_of
from torchpar import testing
from torchpar.comm.collectives import Axis, Call, observers
from torchpar.measure.source_lines import line_of
from torchpar.measure.watch import Sink, Watch
from torchpar.private import process_group_of, tree_leaves

KINDS = {
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "permute",
}
"""The ledger's kind by the beginning of an operator's name, of c10d or functional, without punctuation."""
NAMESPACES = ("c10d", "_c10d_functional")
SILENT = {"recv", "recvanysource", "waittensor", "barrier", "monitoredbarrier", "wraptensorautograd"}
"""Operators that send nothing, or whose sender counts the message."""
WIDEST = 8
"""Bytes of a float64."""


class RankLedger(NamedTuple):
    """One rank's rows, and bytes on the wire by axis: of all operators, and of torchpar's own calls."""

    rows: list[Communication]
    dispatched: Counter[str]
    own: Counter[str]
    problems: Sequence[str] = ()


class LedgerSink(Sink):
    """Records the collectives with their places. `library_calls` are PyTorch's, in order.

    `names` are axes by the name of their process group. In an engine (`infers_purposes`), the calls of
    PyTorch's wrappers get the purpose that they have in the engines. In a program of a user, rows have the
    user's lines, and `meshes` are those of its DTensors.
    """

    def __init__(self, names: Mapping[str, str], *, infers_purposes: bool = False):
        self.meshes: list[DeviceMesh] = []
        self.library_calls: list[Call] = []
        self._problems: list[str] = []
        self._dispatched, self._own = Counter[str](), Counter[str]()
        self._names, self._infers = names, infers_purposes
        self._rows = dict[Communication, list[int]]()

    def call(self, call: Call, full: torch.Tensor, ranks: int) -> None:
        if ranks > 1:
            self._record(call, ranks, [full], full.nbytes)
            self._own[call.axis] += ring_wire_bytes(call.kind, full.nbytes, ranks)

    def operator(self, func: Any, operands: tuple, result: Any) -> None:
        if func.namespace not in NAMESPACES or not observers:  # inside of `unobserved`
            return
        try:
            if not (group := _group_of(func, operands[0])):
                return
            if not (sent := sent_by(func, operands[0], result, group.size())):
                return
        except Exception as error:  # an observer must not break the step
            self._problems.append(f"{func.overloadpacket.__name__} is in no row: {error}")
            return
        (kind, size), ranks = sent, group.size()
        axis = self._names.get(group.group_name) or Axis.from_group(group).name
        self._dispatched[axis] += ring_wire_bytes(kind, size, ranks)
        if ranks > 1 and not self.watch.calls:  # otherwise it is part of a call of torchpar's
            purpose = self._inferred_purpose(kind, axis, _dtypes(operands[0])) if self._infers else ""
            call = Call(kind, axis, purpose)
            self.library_calls.append(call)
            self._record(call, ranks, _tensors(operands[0]), size)

    def enter(self, module: nn.Module) -> None:
        if not (self._infers or self.meshes):
            found = (getattr(parameter, "device_mesh", None) for parameter in module.parameters())
            self.meshes += (mesh for mesh in found if isinstance(mesh, DeviceMesh))

    def result(self) -> RankLedger:
        """The rows, in the order of their first calls."""
        rows = []
        for place, (calls, size, scalars) in self._rows.items():
            wire_bytes = ring_wire_bytes(place.kind, size, place.group_size)
            rows.append(replace(place, calls=calls, bytes=size, wire_bytes=wire_bytes, scalars=scalars))
        return RankLedger(rows, self._dispatched, self._own, [*dict.fromkeys(self._problems)])

    def _record(self, call: Call, ranks: int, tensors: Sequence[torch.Tensor], size: int) -> None:
        """Add one call to its row."""
        frame, module = sys._getframe(1), self.watch.module
        if self.watch.in_backward:
            phase = "backward"
        elif self.watch.is_updating or _runs(frame, lambda code: code is _STEP):
            phase = "update"
        else:
            phase = PHASES.get(call.purpose) or ("forward" if module else "")
        place = Communication(
            **call._asdict(),
            calls=0,
            bytes=0,
            wire_bytes=0,
            group_size=ranks,
            dtype=_dtypes(tensors),
            phase=phase,
            source=": ".join(part for part in (line_of(frame, of_user=not self._infers), module) if part),
        )
        row = self._rows.setdefault(place, [0, 0, 0])
        row[:] = [row[0] + 1, row[1] + size, row[2] + _scalars(tensors, size)]

    @property
    def _gathers_units(self) -> bool:
        """True while FSDP2 or torch-compiler gathers a unit of parameters."""
        return _runs(sys._getframe(2), lambda code: "fully_shard" in code.co_filename)

    def _inferred_purpose(self, kind: str, axis: str, dtype: str) -> str:
        """The purpose of a collective in PyTorch's wrappers: mostly the reduction of gradients."""
        if dtype == "int32":
            return communication.UNUSED  # DDP's map of used parameters
        if kind == "all_to_all" and dtype == "int64":
            return communication.ROUTING
        if axis == PP and kind == "permute":
            return communication.ACTIVATIONS_AND_GRADIENTS  # one batch has both
        # FSDP2 gathers parameters inside of the loss's backward, too.
        if self.watch.module.endswith(".loss") and (axis == TP or kind == "all_reduce"):
            return communication.LOSS
        if axis == TP and self.watch.in_backward and not self.watch.runs_forward:
            is_of_fsdp = _runs(sys._getframe(1), lambda code: _FSDP2 in code.co_filename)
            return communication.REPLICATED_GRADIENTS if is_of_fsdp else communication.ACTIVATION_GRADIENTS
        is_exchange = kind == "all_to_all" or (
            axis == EP and kind == "all_gather" and not self._gathers_units
        )
        if is_exchange or (axis == CP and kind != "all_reduce"):
            is_backward = self.watch.in_backward and not self.watch.runs_forward
            return communication.ACTIVATION_GRADIENTS if is_backward else communication.ACTIVATIONS
        if axis == TP:
            return communication.ACTIVATIONS if self.watch.module else communication.REPLICATED_GRADIENTS
        is_of_parameters = {*parts_of(axis)} <= {*SHARDS} and kind in ("all_gather", "broadcast")
        return communication.PARAMETERS if is_of_parameters else communication.GRADIENTS


@contextmanager
def ledger_of(mesh: DeviceMesh | None = None) -> Generator[Ledger]:
    """The ledger of this rank's communication inside the context. It is filled when the context ends.

    An axis is a dimension of `mesh`. Without `mesh` the axis of PyTorch's default group has the name that the
    DeviceMesh of FSDP2, the mark of the test, or the only DeviceMesh gives it. Otherwise it is `world`.
    """
    dims = (mesh.mesh_dim_names or ()) if mesh else ()
    ledger, sink = Ledger(), LedgerSink({str(mesh.get_group(dim).group_name): dim for dim in dims if mesh})
    try:
        with Watch(sink):
            yield ledger
    finally:
        result = sink.result()
        name = _axis_of_world(sink.meshes) if any(row.axis == WORLD for row in result.rows) else WORLD
        ledger.rows.extend(replace(row, axis=name if row.axis == WORLD else row.axis) for row in result.rows)
        ledger.problems.extend(result.problems)


def _axis_of_world(seen: Sequence[DeviceMesh]) -> str:
    """The dimension of a mesh that PyTorch's default group is; `world` if none is known, or several are."""
    names = _names_of_world(seen)
    if not names and testing.axis_of_world:
        return testing.axis_of_world
    names = names or _names_of_world(_meshes())
    return names.pop() if len(names) == 1 else WORLD


def _names_of_world(meshes: Sequence[DeviceMesh]) -> set[str]:
    return {dim for mesh in meshes for dim in mesh.mesh_dim_names or () if _is_world(mesh, dim)}


def _meshes() -> list[DeviceMesh]:
    """Every DeviceMesh of this process."""

    def find() -> list[DeviceMesh]:
        return [thing for thing in gc.get_objects() if type(thing) is DeviceMesh]

    if found := find():
        del found
        gc.collect()  # some may be garbage
    return find()


def _is_world(mesh: DeviceMesh, dim: str) -> bool:
    try:
        return mesh.get_group(dim) == dist.group.WORLD
    except (RuntimeError, ValueError, KeyError):  # its groups were destroyed
        return False


def of_all_ranks(ranks: Sequence[RankLedger], *, stages: Sequence[int], counts_own: bool) -> Ledger:
    """One ledger of all ranks, in the order of the mesh: for each place of a stage the rank that sends most.

    If all calls are torchpar's (`counts_own`), the dispatcher must report the same bytes.
    """
    most: dict[Communication, Communication] = {}
    for rank, ledger in enumerate(ranks):
        for row in ledger.rows:
            mine = replace(row, stage=stages[rank])
            place = replace(mine, calls=0, bytes=0, wire_bytes=0)
            most[place] = max(most.get(place, mine), mine, key=lambda row: (row.bytes, row.calls))
    problems = [problem for ledger in ranks for problem in ledger.problems]
    if counts_own:
        # Sums over all ranks: the last ranks of an axis have smaller pieces. NCCL pads these.
        dispatched = sum((ledger.dispatched for ledger in ranks), Counter[str]())
        own = sum((ledger.own for ledger in ranks), Counter[str]())
        padding = sum(row.calls for ledger in ranks for row in ledger.rows) * len(ranks) * WIDEST
        problems += [
            f"along {axis} our own calls send {own[axis]:,} bytes, and the dispatcher saw "
            f"{dispatched[axis]:,}"
            for axis in sorted({*dispatched, *own})
            if abs(dispatched[axis] - own[axis]) > padding
        ]
    rows = sorted(most.values(), key=lambda row: row.stage)
    return Ledger(rows=rows, problems=list(dict.fromkeys(problems)))


def kind_of(bare: str) -> str:
    """The ledger's kind of an operator, by its name without punctuation; '' for none."""
    return next((kind for name, kind in KINDS.items() if bare.startswith(name)), "")


def sent_by(func: Any, arguments: tuple, result: Any, ranks: int) -> tuple[str, int] | None:
    """Kind and bytes of an operator of c10d, (outputs, inputs, ...), or a functional one, inputs -> outputs.

    Bytes are of the full (gathered) tensor. An all-to-all counts this rank's tensor, a sparse tensor its
    indices too. None if the operator sends nothing itself. Raises ValueError: an unknown operator.
    """
    name = func.overloadpacket.__name__
    bare = name.replace("_", "")
    if bare in SILENT:
        return None
    outputs, inputs = arguments[:2] if func.namespace == "c10d" else (result, arguments[0])
    match kind := kind_of(bare):
        case "":
            raise ValueError(f"{func.namespace}::{name} is not known")
        case "reduce_scatter" | "all_to_all":
            return kind, _nbytes(inputs)
        case "gather":  # only the root has the outputs
            return kind, _nbytes(inputs) * ranks
        case "scatter":  # only the root has the inputs
            return kind, _nbytes(outputs) * ranks
    return kind, _nbytes(outputs)


def _group_of(func: Any, arguments: tuple) -> dist.ProcessGroup | None:
    """The process group of an operator; None if it has no such argument."""
    for argument, value in zip(func._schema.arguments, arguments, strict=False):
        if argument.name == "process_group":
            return dist.ProcessGroup.unbox(value)
        if argument.name == "group_name":
            return process_group_of(value) if isinstance(value, str) else value
    return None


def _dtypes(tree: object) -> str:
    return ", ".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in _tensors(tree)))


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _scalars(tensors: Sequence[torch.Tensor], size: int) -> int:
    """Bytes of single numbers among the tensors of a call, which has `size` bytes."""
    single = sum(tensor.nbytes for tensor in tensors if tensor.numel() == 1)
    return size if any(tensor.ndim == 0 for tensor in tensors) and len(tensors) == 1 else min(single, size)


def _nbytes(tree: object) -> int:
    tensors = _tensors(tree)
    parts = ((t._indices(), t._values()) if t.is_sparse else (t,) for t in tensors)
    return sum(part.nbytes for dense in parts for part in dense)


_STEP = cast(FunctionType, Optimizer.profile_hook_step(lambda optimizer: None)).__code__
"""The code of PyTorch's wrapper around `step` of every optimizer."""
_FSDP2 = str(Path("distributed", "fsdp", "_fully_shard"))


def _runs(frame: FrameType | None, is_asked: Callable[[CodeType], bool]) -> bool:
    while frame and not is_asked(frame.f_code):
        frame = frame.f_back
    return frame is not None
