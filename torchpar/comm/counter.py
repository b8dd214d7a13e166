"""A count of what is communicated: by kind, mesh axis and purpose."""

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from compare.contract.communication import Communication, ring_wire_bytes


class Call(NamedTuple):
    """A row of the ledger: kind, axis and purpose of its calls."""

    kind: str
    axis: str
    purpose: str


class CallObserver(Protocol):
    """Observer of every call, on any mesh."""

    def begins(self, call: Call, full: torch.Tensor, members: Sequence[int], to: int | None) -> None:
        """A call over a gathered tensor, any shape, begins; calls within it come before `ends`.

        `members` are the ranks of its group, among all; `to` is the one that a message is for.
        """
        ...

    def ends(self) -> None:
        """The call has been handed on."""
        ...


observers: list[CallObserver] = []


@contextmanager
def observed(
    call: Call, full: torch.Tensor, members: Sequence[int], to: int | None = None
) -> Generator[None]:
    """Tell the observers of a call inside: see `CallObserver.begins`."""
    watching = list(observers)
    for observer in watching:
        observer.begins(call, full, members, to)
    try:
        yield
    finally:
        for observer in watching:
            observer.ends()


class Traffic:
    """Counts of the collectives that passed through the axes of one mesh.

    Attributes:
        calls, bytes: by kind, axis and purpose; bytes are those of the full (gathered) tensors.
        is_paused: nothing is counted just now.
    """

    def __init__(self):
        self.calls: dict[Call, int] = defaultdict(int)
        self.bytes: dict[Call, int] = defaultdict(int)
        self.is_paused = False

    def add(self, call: Call, size: int) -> None:
        """Count one call over `size` logical bytes."""
        if not self.is_paused:
            self.calls[call] += 1
            self.bytes[call] += size

    @contextmanager
    def paused(self) -> Generator[None]:
        """Pause the count inside: gathers for the record are outside of a step."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def clear(self) -> None:
        """Forget everything counted so far."""
        self.calls.clear()
        self.bytes.clear()

    def ledger(self, sizes: Mapping[str, int]) -> list[Communication]:
        """The count as a record's ledger. `sizes`: the number of ranks along each axis."""
        return [
            Communication(
                kind=call.kind,
                axis=call.axis,
                purpose=call.purpose,
                calls=calls,
                bytes=self.bytes[call],
                wire_bytes=ring_wire_bytes(call.kind, self.bytes[call], sizes[call.axis]),
            )
            for call, calls in sorted(self.calls.items())
        ]
