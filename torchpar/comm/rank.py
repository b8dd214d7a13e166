"""A rank: one process's place among all, and how it shows that it is alive."""

from collections.abc import MutableSequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PHASES = (
    "starting",
    "setting up",
    "forward",
    "backward",
    "synchronisation",
    "optimizer",
    "record",
    "evaluation",
)
_BEFORE_STEPS = PHASES[:2]  # until all have met; then model, data, and what wraps them
_FIELDS = 3  # beats, step, phase


class Position(NamedTuple):
    """Progress of a rank. All ranks run the same sequence of phases, so `beats` says who is behind."""

    beats: int
    step: int
    phase: str

    @property
    def has_joined(self) -> bool:
        """True if the rank has met all others."""
        return self.phase != "starting"

    @property
    def in_step(self) -> bool:
        """True if it has come to its first step."""
        return self.phase not in _BEFORE_STEPS

    @property
    def when(self) -> str:
        """For a sentence: what happened, and then."""
        return f"at step {self.step}" if self.in_step else "before the first step"

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}" if self.in_step else "its start"


class Heartbeat:
    """Positions of all ranks, in memory that they share with the launcher.

    Args:
        cells: 3 integers for each rank.
    """

    def __init__(self, cells: MutableSequence[int]):
        self._cells = cells

    @staticmethod
    def cells_for(ranks: int) -> int:
        """Number of integers that are needed."""
        return _FIELDS * ranks

    def beat(self, rank: int, step: int, phase: str) -> None:
        """Rank `rank` enters a phase."""
        base = _FIELDS * rank
        self._cells[base + 1] = step
        self._cells[base + 2] = PHASES.index(phase)
        self._cells[base] += 1

    def position(self, rank: int) -> Position:
        """Position of rank `rank`."""
        beats, step, phase = self._cells[_FIELDS * rank : _FIELDS * (rank + 1)]
        return Position(beats, step, PHASES[phase])


@dataclass(frozen=True)
class Rank:
    """One process among `world_size`.

    Attributes:
        rank, world_size: among all processes.
        local_rank: among those of this machine; the GPU to use.
        heartbeat: where it shows its progress.
        rendezvous: the file through which the ranks meet; None for torchrun's address and port.
        timeout_s: seconds without progress after which the run counts as hung.
        launcher_cpu_s: CPU seconds that the launcher spent for all ranks before it started them.
    """

    rank: int
    world_size: int
    local_rank: int
    heartbeat: Heartbeat
    rendezvous: Path | None = None
    timeout_s: float = 600.0
    launcher_cpu_s: float = 0.0

    @property
    def collective_timeout_s(self) -> float:
        """Collective time-out (s), longer than the launcher's: it names the lagging rank first."""
        return self.timeout_s + 30.0

    @property
    def position(self) -> Position:
        """Position of this rank."""
        return self.heartbeat.position(self.rank)

    def at(self, step: int, phase: str) -> None:
        """Say that this rank enters a phase (one of PHASES) of a step."""
        self.heartbeat.beat(self.rank, step, phase)
