"""What `shardpair plan` keeps."""

from msgspec import Struct, field

from compare.contract.ahead_of_time import CompiledAhead
from compare.contract.memory_profile import DeviceMemory
from compare.judge.ledger import Flow
from compare.plan.machine import Machine
from compare.plan.search import USABLE, Candidate, Found, frontier
from compare.spec.experiment import Experiment, ExperimentError

KEPT, NEAREST = 400, 20


class Full(Struct, frozen=True, kw_only=True):
    """Layouts that do not fit, and of which class a device is full."""

    layouts: int
    least: float
    """Bytes that the smallest of them would need."""


class StepAlone(Struct, frozen=True, kw_only=True):
    """A step of one layout's first rank without the others: what it sends, and what it keeps."""

    layout: str
    flows: list[Flow]
    memory: DeviceMemory


class AbsentStep(Struct, frozen=True, kw_only=True):
    """What a compiler made of one layout's step for the machine, and its ledger beside the closed form."""

    layout: str
    topology: str
    found: CompiledAhead
    flows: list[Flow]


class PlanOutcome(Struct, frozen=True, kw_only=True):
    """Layouts that fit, fastest first, and how many do not, or are refused, and why."""

    experiment: Experiment
    machine: Machine
    engine: str
    left_out: dict[str, str] = {}
    """What could not be, and why."""
    candidates: list[Candidate]
    """The fastest `KEPT`, and those that are smaller than any faster one."""
    fitting: int
    """How many there were."""
    dropped: dict[str, Full]
    """By the class with which a device is full."""
    nearest: list[Candidate] = field(default_factory=list)
    """The smallest of those that do not fit."""
    explain: str = ""
    """The layout whose sum is written out."""
    alone: list[StepAlone] = field(default_factory=list)
    """Layouts whose first rank ran alone."""
    absent: list[AbsentStep] = field(default_factory=list)
    """Layouts that were compiled for the machine."""
    problems: list[str] = field(default_factory=list)
    """What could not be read of those."""


def keep(
    found: Found,
    *,
    experiment: Experiment,
    machine: Machine,
    engine: str,
    explain: str,
) -> PlanOutcome:
    """What is kept of a search.

    Args:
        found: all of it.
        experiment, machine, engine, explain: as of `PlanOutcome`.
    """
    dropped: dict[str, Full] = {}
    for one in found.dropped:
        kind = one.too_large(USABLE * machine.memory_bytes)
        so_far = dropped.get(kind, Full(layouts=0, least=one.bytes))
        dropped[kind] = Full(layouts=so_far.layouts + 1, least=min(so_far.least, one.bytes))
    best = found.fitting[:KEPT]
    names = {one.name for one in best}
    return PlanOutcome(
        experiment=experiment,
        machine=machine,
        engine=engine,
        candidates=[*best, *(one for one in frontier(found.fitting) if one.name not in names)],
        fitting=len(found.fitting),
        dropped=dropped,
        nearest=sorted(found.dropped, key=lambda one: one.bytes)[:NEAREST],
        left_out=found.refused,
        explain=explain,
    )


def chosen(outcome: PlanOutcome) -> Candidate:
    """The layout of --explain, which need not fit. Raises ExperimentError: none of this name or place."""
    word, ranked = outcome.explain, outcome.candidates
    if word.isdecimal() and 1 <= int(word) <= len(ranked):
        return ranked[int(word) - 1]
    found = next((one for one in (*ranked, *outcome.nearest) if one.name == word), None)
    if not found:
        raise ExperimentError(
            f"--explain {word}: give a place from 1 to {len(ranked)}, or the name of a layout that is kept"
        )
    return found
