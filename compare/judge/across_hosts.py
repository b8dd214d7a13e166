"""What crosses hosts, measured and in closed form: by kind, axis and purpose, of all devices together.

Measured is which devices a collective's groups have, and on which hosts they were; expected is where the
layout puts them. A line that a known pattern explains is expected to cross with the bytes that were sent.
"""

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from compare.contract.communication import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    ACTIVATIONS_AND_GRADIENTS,
    METRICS,
    Communication,
)
from compare.contract.ledger import SCALAR
from compare.contract.record import Record
from compare.judge.closed_forms.across_hosts import crossing
from compare.judge.closed_forms.communication import communication
from compare.judge.ledger_lines import Line
from compare.spec.experiment import Experiment, Layout

Key = tuple[str, str, str]


class Crossing(Struct, frozen=True, kw_only=True):
    """Bytes that cross hosts in a step."""

    kind: str
    axis: str
    purpose: str
    closed_form: float
    """From the closed form's bytes of a device."""
    expected: float
    """From those that were sent."""
    found: int
    rows: int
    """Rows of the ledger, each rounded to whole bytes."""

    @property
    def is_as_expected(self) -> bool:
        """True if only rounding is between them."""
        return abs(self.found - self.expected) <= self.rows

    def __str__(self) -> str:
        """An objection in a few words."""
        what = f"{self.kind} over {self.axis} for {self.purpose}"
        return f"{self.found:,} bytes of {what} across hosts instead of {self.expected:,.0f}"


def hosts_of(record: Record) -> int:
    """Number of hosts that a run's devices were on; 1 where the record does not say."""
    return len(set(record.manifest.hosts)) or 1


def crossings(
    engine: str, experiment: Experiment, lines: Iterable[Line], rows: Iterable[Communication], hosts: int
) -> list[Crossing]:
    """What crosses hosts, of all lines of a ledger, those that should cross none included.

    Args:
        engine: a name in ENGINES.
        experiment: as it was run, with `layout.remat` resolved.
        lines: of the ledger (`ledger_lines.line_up`).
        rows: of the record.
        hosts: their number.

    Raises:
        ValueError: a kind of collective that has no closed form.
    """
    usual, expected = dict[Key, float](), dict[Key, float]()
    for line in lines:
        key = (line.kind, line.axis, line.purpose)
        usual[key] = usual.get(key, 0) + _expected(engine, experiment, line, line.expected, hosts)
        expected[key] = expected.get(key, 0) + _expected(engine, experiment, line, line.found, hosts)
    found, counted = Counter[Key](), Counter[Key]()
    for row in rows:
        if row.bytes > SCALAR * row.calls and row.purpose != METRICS:
            key = (row.kind, row.axis, row.purpose)
            found[key] += row.crossing_bytes
            counted[key] += 1
    return [
        Crossing(
            kind=kind,
            axis=axis,
            purpose=purpose,
            closed_form=usual[key],
            expected=size,
            found=found[key],
            rows=counted[key],
        )
        for key, size in expected.items()
        for kind, axis, purpose in [key]
    ]


def _expected(engine: str, experiment: Experiment, line: Line, sent_bytes: float, hosts: int) -> float:
    """What crosses hosts of a line with so many bytes of a device."""
    if line.purpose != ACTIVATIONS_AND_GRADIENTS:
        return _crossing(line, line.purpose, sent_bytes, experiment.layout, hosts)
    sent = communication(engine, experiment, stage=line.stage)
    parts = {
        purpose: sent.get((line.kind, line.axis, purpose), 0.0)
        for purpose in (ACTIVATIONS, ACTIVATION_GRADIENTS)
    }
    return sum(
        _crossing(line, purpose, size * sent_bytes / line.expected, experiment.layout, hosts)
        for purpose, size in parts.items()
        if size
    )


def _crossing(line: Line, purpose: str, size: float, layout: Layout, hosts: int) -> float:
    return crossing(line.kind, line.axis, purpose, size, layout=layout, hosts=hosts, stage=line.stage)
