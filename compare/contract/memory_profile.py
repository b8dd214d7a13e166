"""Memory of one step by class, RUN_DIR/memory.json: at the peak, and in PyTorch over the whole step.

PyTorch's side watches every operation of a step. XLA plans a step as a whole and reports the plan's sizes.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from msgspec import UNSET, Struct, UnsetType, field

MEMORY = "memory.json"
POINTS = 300
"""Maximum number of points of a curve, for a picture."""

Class = str
MEANINGS: dict[Class, str] = {
    "parameters": "as stored between steps: whole, or this device's shards",
    "optimizer": "moments, and counts of steps",
    "gradients": "input of the optimizer",
    "gathered parameters": "whole parameters, gathered from shards for use",
    "activations": "stored by forward for backward",
    "logits": "and the loss's intermediate arrays of the same size",
    "communication buffers": "inputs and outputs of collectives outside the classes above; pipeline messages",
    "XLA's temporaries": "everything between the arguments and the results of a compiled step: gradients, "
    "gathered parameters, activations, logits, buffers",
    "temporaries": "everything else: results that the next operation reads, the batch, scalars",
}
"""Classes of memory and their contents."""
CLASSES = tuple(MEANINGS)
Phase = Literal["forward", "backward", "update"]


class Peak(Struct, frozen=True, kw_only=True):
    """Peak memory in use, and its moment; XLA's plan has no moment."""

    bytes: dict[Class, int]
    position: int = 0
    """Number of the operation in the step."""
    phase: Phase | Literal[""] = ""
    operation: str = ""
    """Operation, by the framework's name."""
    place: str = ""
    """Module of the operation; '' if unknown."""

    @property
    def total(self) -> int:
        """All classes together."""
        return sum(self.bytes.values())


class Curve(Struct, frozen=True, kw_only=True):
    """Bytes in use over a step. Each point is the fullest operation of a stretch, so the peak is a point."""

    positions: list[int]
    bytes: dict[Class, list[int]]
    """Bytes at each position, by class."""
    marks: list[tuple[int, Phase]] = field(default_factory=list)
    """Positions at which phases start."""
    length: int = 0
    """Number of operations of the step."""


class DeviceMemory(Struct, frozen=True, kw_only=True):
    """One device's memory over a step."""

    peak: Peak
    curve: Curve | UnsetType = UNSET
    """Curve over the step; unset for XLA."""
    allocator_peak: int = 0
    """Peak of a GPU's allocator, with its rounding and kernel scratch memory; 0 on a CPU."""
    outside_allocator: int = 0
    """Bytes in use on the GPU that the allocator does not have: CUDA's context, NCCL's communicators, other
    processes. 0 on a CPU."""


class MemoryProfile(Struct, frozen=True, kw_only=True):
    """Memory of one step on all devices."""

    devices: list[DeviceMemory]
    """Devices in mesh order; a single entry stands for all devices of one program."""
    method: str
    """Method of the measurement and its limits."""

    @property
    def fullest(self) -> int:
        """Number of the device with the highest peak."""
        return max(range(len(self.devices)), key=lambda device: self.devices[device].peak.total)


def device_memory(
    lifetimes: Iterable[tuple[Class, int, int, int]],
    phases: Sequence[Phase],
    operations: Sequence[tuple[object, str]],
    **of_allocator: int,
) -> DeviceMemory:
    """Memory of a device over a step. Each position has a phase, and an operation with its module.

    A lifetime is a class, a number of bytes, and the positions of the first and the last use. The other
    arguments are fields of DeviceMemory.
    """
    length = max(len(operations), 1)
    changes = {kind: np.zeros(length + 1, np.int64) for kind in CLASSES}
    for kind, size, begin, end in lifetimes:
        changes[kind][min(begin, length)] += size
        changes[kind][min(end, length)] -= size
    in_use = {kind: change.cumsum()[:length] for kind, change in changes.items()}
    total = np.sum(list(in_use.values()), axis=0)
    top = int(np.argmax(total))
    operation, place = operations[top] if operations else ("", "")
    peak = Peak(
        position=top,
        bytes={kind: int(series[top]) for kind, series in in_use.items()},
        phase=phases[top] if phases else "forward",
        operation=str(operation),
        place=place,
    )
    # At most POINTS positions: the fullest of each stretch, and the last of the step.
    edges = np.unique(np.linspace(0, length, min(POINTS, length + 1)).astype(int))
    fullest = {int(a + np.argmax(total[a:b])) for a, b in itertools.pairwise(edges)}
    positions = sorted({*fullest, length - 1})
    curve = Curve(
        positions=positions,
        bytes={kind: series[positions].tolist() for kind, series in in_use.items()},
        marks=[(n, phase) for n, phase in enumerate(phases) if not n or phase != phases[n - 1]],
        length=length,
    )
    return DeviceMemory(peak=peak, curve=curve, **of_allocator)
