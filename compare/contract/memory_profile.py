"""Memory of one step by class, at its peak and, where it was watched, over the step: RUN_DIR/memory.json.

PyTorch's side watches every operation of a step. XLA plans a step as a whole and gives the sizes of its plan.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from msgspec import UNSET, Struct, UnsetType, field

MEMORY = "memory.json"
POINTS = 300
"""Most points of a curve: as many as a picture can show."""

Class = str
MEANINGS: dict[Class, str] = {
    "parameters": "as they are between two steps: whole, or this device's shards",
    "optimizer": "moments, and counts of steps",
    "gradients": "what the optimizer is given",
    "gathered parameters": "whole ones, made of shards for use",
    "activations": "kept by a forward for its backward",
    "logits": "and what the loss makes of them, as large as they are",
    "communication buffers": "what collectives read or write and is none of the above; a pipeline's messages",
    "XLA's temporaries": "all that a compiled step makes between its arguments and its results: gradients, "
    "gathered parameters, activations, logits, buffers",
    "temporaries": "all else: results that the next operation reads, the batch, scalars",
}
"""The classes of what is in memory: what belongs to each."""
CLASSES = tuple(MEANINGS)
Phase = Literal["forward", "backward", "update"]


class Peak(Struct, frozen=True, kw_only=True):
    """The most memory that is in use, and the moment at which it is; of XLA's plan no moment is known."""

    bytes: dict[Class, int]
    position: int = 0
    """Number of the operation in the step."""
    phase: Phase | Literal[""] = ""
    operation: str = ""
    """By the framework's name."""
    place: str = ""
    """The module; '' if that cannot be told."""

    @property
    def total(self) -> int:
        """All classes together."""
        return sum(self.bytes.values())


class Curve(Struct, frozen=True, kw_only=True):
    """Bytes in use over a step. Of each stretch of operations the fullest is a point: the peak is one."""

    positions: list[int]
    bytes: dict[Class, list[int]]
    """By class, at each position."""
    marks: list[tuple[int, Phase]] = field(default_factory=list)
    """At which position each phase begins."""
    length: int = 0
    """Operations of the step."""


class DeviceMemory(Struct, frozen=True, kw_only=True):
    """One device's memory over a step."""

    peak: Peak
    curve: Curve | UnsetType = UNSET
    """Unset for a step that XLA has planned."""
    allocator_peak: int = 0
    """What a GPU's allocator gave out at most, its rounding and kernels' scratch included; 0 on a CPU."""


class MemoryProfile(Struct, frozen=True, kw_only=True):
    """Memory of one step on all devices."""

    devices: list[DeviceMemory]
    """In the order of the mesh; one alone stands for all, where they run one program."""
    method: str
    """Method and its limits, in words."""

    @property
    def fullest(self) -> int:
        """The device with the highest peak, the first of equals."""
        return max(range(len(self.devices)), key=lambda device: self.devices[device].peak.total)


def device_memory(
    lifetimes: Iterable[tuple[Class, int, int, int]],
    phases: Sequence[Phase],
    operations: Sequence[tuple[object, str]],
    *,
    allocator_peak: int = 0,
) -> DeviceMemory:
    """A device's memory over a step, whose positions have a phase, and an operation with its module.

    `lifetimes` are a class, its bytes, and the positions from which on and until which they are there.
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
    # At most POINTS positions: of each stretch the fullest, and the step's last.
    edges = np.unique(np.linspace(0, length, min(POINTS, length + 1)).astype(int))
    fullest = {int(a + np.argmax(total[a:b])) for a, b in itertools.pairwise(edges)}
    positions = sorted({*fullest, length - 1})
    curve = Curve(
        positions=positions,
        bytes={kind: series[positions].tolist() for kind, series in in_use.items()},
        marks=[(n, phase) for n, phase in enumerate(phases) if not n or phase != phases[n - 1]],
        length=length,
    )
    return DeviceMemory(peak=peak, curve=curve, allocator_peak=allocator_peak)
