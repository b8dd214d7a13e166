"""What the findings of every study have in common: the line and the circumstances, and what is missing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from compare.judge.outcome import OUTCOME, Outcome
from compare.show.findings import Findings
from compare.spec.experiment import to_toml


def findings_of(
    outcome: Outcome,
    *,
    sentence: str,
    title: str = "",
    rows: object = (),
    value: Mapping[str, object] = {},
    passed: bool = True,
    warnings: Sequence[str] = (),
    **more: Any,
) -> Findings:
    """Findings with what is the same for every study: what it was asked, where and when, JSON.

    A study passes only if no case is missing. `rows` are what its tables are made of, and `value` is more for
    JSON; `more` are other fields of `Findings`.
    """
    incomplete = "" if outcome.is_complete or sentence.startswith("INCOMPLETE") else "INCOMPLETE: "
    versions = ", ".join(map(" ".join, outcome.circumstances.versions.items()))
    return Findings(
        title=title or outcome.name,
        sentence=f"{incomplete}{sentence}",
        value={"rows": rows, **value, "warnings": warnings, "result": outcome},
        passed=passed and outcome.is_complete,
        warnings=warnings,
        missing=outcome.undone,
        continuation="" if outcome.is_complete else outcome.how_to_go_on(Path()),
        left_out=outcome.left_out,
        spec=to_toml(outcome.experiment),
        command=outcome.line,
        source=f"{outcome.circumstances.words} {versions}. Every value is in {OUTCOME} beside this page.",
        **more,
    )


def verdict_findings(
    outcome: Outcome, *, passed: bool | None = None, sentence: str = "", **more: Any
) -> Findings:
    """Findings of cases that are held against others; the JSON is the outcome itself."""
    passed = outcome.passed if passed is None else passed
    found = findings_of(outcome, sentence=sentence or outcome.sentence(), passed=passed, **more)
    return replace(found, value=outcome)
