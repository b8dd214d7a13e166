"""A ledger line by line beside the closed form of its layout: expected, missing, unexpected, and why."""

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from compare.contract.communication import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    ACTIVATIONS_AND_GRADIENTS,
    METRICS,
    Communication,
)
from compare.contract.ledger import SCALAR
from compare.judge.closed_forms.communication import Bytes, communication
from compare.judge.known_deviations import explained
from compare.judge.unexplained import seen
from compare.spec.experiment import Experiment

State = Literal["expected", "different", "missing", "unexpected"]
ORDER: tuple[State, ...] = ("unexpected", "missing", "different", "expected")


class Line(Struct, frozen=True, kw_only=True):
    """Bytes of one kind, axis and purpose that a device sends in a step: expected and found."""

    kind: str
    axis: str
    purpose: str
    stage: int
    """The rank of the pipeline; 0 without one."""
    expected: float
    """Logical bytes of the closed form; 0 if there should be none."""
    found: int
    calls: int
    why: str = ""
    """The known pattern that gives these bytes; empty for the closed form's, and for unexplained ones."""
    seen: str = ""
    """The version in which this unexplained difference was seen before; empty for any other."""

    @property
    def state(self) -> State:
        """Relation of found to expected bytes."""
        if self.found == self.expected:
            return "expected"
        if not self.expected:
            return "unexpected"
        return "different" if self.found else "missing"

    @property
    def is_explained(self) -> bool:
        """True if it is as expected, or a known pattern says why it is not."""
        return self.state == "expected" or bool(self.why)

    @property
    def is_new(self) -> bool:
        """True if it differs, and neither a known pattern explains it nor was it seen before."""
        return not self.is_explained and not self.seen


def line_up(engine: str, experiment: Experiment, rows: Iterable[Communication]) -> list[Line]:
    """The lines of one engine's ledger, new differences first; numbers that go alone are left out.

    Args:
        engine: a name in ENGINES.
        experiment: as it was run, with `layout.remat` resolved.
        rows: of its record.

    Raises:
        ValueError: the layout has no closed form.
    """
    rows, lines = list(rows), []
    for stage in range(experiment.layout.pp):
        found, calls = _sums(row for row in rows if row.stage == stage)
        expected = _as_told_apart(communication(engine, experiment, stage=stage), found)
        why = explained(engine, experiment, expected=expected, found=found, stage=stage)
        before = seen(engine, experiment.layout, expected=expected, found=found)
        lines += [
            Line(
                kind=key[0],
                axis=key[1],
                purpose=key[2],
                stage=stage,
                expected=expected.get(key, 0.0),
                found=found.get(key, 0),
                calls=calls.get(key, 0),
                why=why.get(key, ""),
                seen="" if key in why else before.get(key, ""),
            )
            for key in dict.fromkeys((*expected, *found))
        ]
    return sorted(
        lines,
        key=lambda line: (not line.is_new, line.is_explained, ORDER.index(line.state), line.axis, line.kind),
    )


def _sums(rows: Iterable[Communication]) -> tuple[dict, dict]:
    """Bytes and calls by (kind, axis, purpose)."""
    size: dict[tuple[str, str, str], int] = {}
    calls: dict[tuple[str, str, str], int] = {}
    for row in rows:
        if row.bytes > SCALAR * row.calls and row.purpose != METRICS:
            key = (row.kind, row.axis, row.purpose)
            size[key] = size.get(key, 0) + row.bytes
            calls[key] = calls.get(key, 0) + row.calls
    return size, calls


def _as_told_apart(expected: Bytes, found: dict) -> Bytes:
    """The closed form, with activations and their gradients as one where the ledger has them so."""
    merged = dict(expected)
    for kind, axis, purpose in found:
        if purpose == ACTIVATIONS_AND_GRADIENTS:
            parts = [merged.pop((kind, axis, one), 0.0) for one in (ACTIVATIONS, ACTIVATION_GRADIENTS)]
            merged[kind, axis, purpose] = sum(parts)
    return merged
