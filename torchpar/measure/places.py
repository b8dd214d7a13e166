"""The ledger of any module: what PyTorch's dispatcher sees, with the place in the program that sent it.

    with torchpar.ledger(mesh) as ledger:
        loss(model(x)).backward()
    print(ledger)

Of torchpar's own collectives a row is the collective, whatever it is made of: on gloo a gather is sends.
"""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from compare.contract.communication import Communication, ring_wire_bytes
from compare.contract.ledger import Ledger
from torchpar.comm.counter import Call, observers
from torchpar.comm.mesh import Mesh
from torchpar.measure.ledger import call_of

OUTSIDE = "Global"
"""ModuleTracker's word for no module."""
_NOT_A_PLACE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1] / "comm"), __file__)


@contextmanager
def ledger_of(mesh: Mesh | DeviceMesh | None = None) -> Generator[Ledger]:
    """What this rank communicates inside, a row for each place; filled when it ends.

    Args:
        mesh: names the process groups; by default they are world and subgroup.
    """
    ledger, mode = Ledger(), LedgerMode(group_names(mesh))
    handles = [
        register_optimizer_step_pre_hook(lambda *_: mode.updates(True)),
        register_optimizer_step_post_hook(lambda *_: mode.updates(False)),
    ]
    observers.append(mode)
    try:
        with mode.modules, mode:
            yield ledger
    finally:
        observers.remove(mode)
        for handle in handles:
            handle.remove()
        ledger.rows.extend(mode.rows())


def group_names(mesh: Mesh | DeviceMesh | None) -> dict[str, str]:
    """The axis of every process group that has one, by the group's name."""
    groups = [(dist.group.WORLD, "world")]
    if isinstance(mesh, Mesh):
        groups += [(axis.group, axis.name) for axis in mesh.axes]
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or [f"dim {dim}" for dim in range(mesh.ndim)]
        groups += [(mesh.get_group(dim), name) for dim, name in enumerate(names)]
    return {str(group.group_name): name for group, name in groups if group}


class LedgerMode(TorchDispatchMode):
    """Notes every collective with its place; an `Observer` of torchpar's own.

    Args:
        axes: of process groups, by their names.

    Attributes:
        modules: which are running; to be entered as well.
    """

    def __init__(self, axes: dict[str, str]):
        super().__init__()
        self.modules = ModuleTracker()
        self._axes, self._rows = axes, dict[tuple, list[int]]()
        self._is_updating, self._depth = False, 0

    def updates(self, begins: bool) -> None:
        """An optimizer's step begins, or ends."""
        self._is_updating = begins

    def begins(self, call: Call, full: torch.Tensor, ranks: int) -> None:
        """Note one of torchpar's own collectives; what it sends itself is part of it."""
        dtype = str(full.dtype).removeprefix("torch.")
        self._note(call.kind, call.axis, call.purpose, ranks, dtype, full.nbytes)
        self._depth += 1

    def ends(self) -> None:
        """It has been sent."""
        self._depth -= 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor first: what it makes of the operator comes back here
        result = func(*args, **(kwargs or {}))
        seen = None if self._depth else call_of(func, args, kwargs or {}, result)
        if seen:
            ranks = _resolve_process_group(cast(Any, seen.group)).size()  # a NewType in later PyTorch
            self._note(seen.kind, self._axes.get(seen.group, "subgroup"), "", ranks, seen.dtype, seen.bytes)
        return result

    def rows(self) -> list[Communication]:
        """What was noted, in the order in which it first came."""
        return [
            Communication(
                kind=kind,
                axis=axis,
                purpose=purpose,
                calls=calls,
                bytes=size,
                wire_bytes=ring_wire_bytes(kind, size, ranks),
                group_size=ranks,
                dtype=dtype,
                phase=phase,
                source=source,
            )
            for (kind, axis, purpose, ranks, dtype, phase, source), (calls, size) in self._rows.items()
        ]

    def _note(self, kind: str, axis: str, purpose: str, ranks: int, dtype: str, size: int) -> None:
        if ranks == 1:
            return
        row = self._rows.setdefault((kind, axis, purpose, ranks, dtype, self._phase, self._source), [0, 0])
        row[:] = [row[0] + 1, row[1] + size]

    @property
    def _phase(self) -> str:
        if self.modules.is_bw:
            return "backward"
        return "update" if self._is_updating else "forward" if self._module else ""

    @property
    def _module(self) -> str:
        """The innermost module that is running."""
        return max(self.modules.parents - {OUTSIDE}, key=lambda name: name.count("."), default="")

    @property
    def _source(self) -> str:
        """The innermost module, and the innermost line outside of PyTorch."""
        return ": ".join(part for part in (_line(sys._getframe(1)), self._module) if part)


def _line(frame: FrameType | None) -> str:
    while frame and frame.f_code.co_filename.startswith(_NOT_A_PLACE):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"
