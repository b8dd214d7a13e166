"""The JSON object that every command prints with `--json`.

`docs/records.md` lists its fields, and the keys of `values` by command. `docs/generated/envelope.schema.json`
is its JSON Schema.
"""

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from compare.judge.outcome import Outcome
from compare.judge.trace import Difference
from compare.judge.verdict import Verdict

VERSION = 1
"""Version of the form. It grows when a field is removed or changes its meaning."""

State = Literal["passed", "failed", "not compared", "missing", "planned", "refused"]


class RungState(Struct, frozen=True, kw_only=True):
    """A rung of the ladder that was compared."""

    passed: bool
    error: float | None
    """Largest relative error; null if it is not finite."""
    tolerance: float
    worst: str
    """Place of the largest error."""


class CaseState(Struct, frozen=True, kw_only=True):
    """A case of a study."""

    engine: str
    state: State
    """planned and refused: cases of a dry run. not compared: it finished, and has no reference."""
    verdict: str = ""
    """PASS, the first failed rung, or the reason why the case is missing or refused."""
    against: str = ""
    """The reference."""
    rungs: dict[str, RungState] = {}
    trace: Difference | None = None
    """First place where the first step differs (`compare.judge.trace`); null without a trace."""
    figures: dict[str, Any] = {}
    """Values that the study kept of the last round, such as `final_loss`."""


class TextTable(Struct, frozen=True, kw_only=True):
    """A table as it is printed. `values` has the numbers."""

    name: str
    columns: list[str]
    """Headers. The first is the header of the rows' names."""
    rows: list[list[str]]


class Envelope(Struct, frozen=True, kw_only=True):
    """All output of a command."""

    study: str
    """Word of the command, such as run or plan."""
    version: int = VERSION
    passed: bool
    """Whether every case finished, and every comparison passed; of a dry run, whether nothing is refused."""
    verdict: str
    """The result in one line, as it is printed last."""
    dry_run: bool = False
    """Whether nothing was started."""
    folder: str = ""
    """Folder of the results; '' for none."""
    page: str = ""
    """HTML page; '' for none."""
    cases: dict[str, CaseState] = {}
    tables: list[TextTable] = []
    warnings: list[str] = []
    """Reasons not to trust the figures."""
    notes: list[str] = []
    missing: dict[str, str] = {}
    """Cases without a result, with the reason."""
    left_out: dict[str, str] = {}
    """Cases that cannot run, with the reason."""
    values: dict[str, Any] = {}
    """Values of the command."""


def states_of(outcome: Outcome) -> dict[str, CaseState]:
    """The state of every case of a study, in their order."""
    verdicts, undone = {verdict.candidate: verdict for verdict in outcome.verdicts}, outcome.undone
    figures, states = outcome.values(dict), dict[str, CaseState]()
    for name, case in outcome.cases.items():
        how: dict[str, Any] = {"engine": case.engine, "figures": figures.get(name, {})}
        if name in verdicts:
            states[name] = state_of(verdicts[name], **how)
        else:
            why = undone.get(name, "")
            states[name] = CaseState(state="missing" if why else "not compared", verdict=why, **how)
    return states


def state_of(verdict: Verdict, *, engine: str, figures: Mapping[str, Any] = {}) -> CaseState:
    """The state of a case that was compared."""
    return CaseState(
        engine=engine,
        state="passed" if verdict.passed else "failed",
        verdict=verdict.sentence(),
        against=verdict.reference,
        rungs={
            one.rung: RungState(passed=one.passed, error=one.error, tolerance=one.tolerance, worst=one.worst)
            for one in verdict.rungs
        },
        trace=verdict.trace or None,
        figures=dict(figures),
    )
