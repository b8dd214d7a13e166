"""Planted faults are caught: each once, in one of the engines that can make it.

`shardpair faults` plants each in all engines.
"""

import re

import pytest

from compare.cli import main
from compare.commands.faults import FAULTS, Faults, fault_cases, rows_of
from compare.judge.outcome import Case, read_outcome
from compare.judge.verdict import TRACED, RungResult, Verdict
from compare.setup.planted import ROOT
from compare.spec.engines.registry import JAX, STUDIED
from compare.spec.experiment import ExperimentError
from tests.support.grid import TEXT
from tests.support.records import make_request, outcome_of

IN_JAX = {
    "moved_weight", "reversed_update", "ignored_bucket_mb", "ignored_offload", "ignored_sequence_parallel",
    "ignored_dtype", "norm_in_16_bits", "stream_in_16_bits",
}  # fmt: skip
"""The faults that are planted in JAX here: each is a step to compile."""
SLOWEST = "torch-compiler"
"""The slowest of torchpar's engines on models so small: its turn comes seldom."""
SHORT = ("--data.source", str(TEXT), "--devices", "2")


def engine_of(turn: int, name: str) -> str:
    """The engine of a fault in this test: the engines take turns."""
    side = JAX.name if name in IN_JAX else "torchpar"
    able = [
        engine for engine, of in STUDIED.items() if of.side == side and FAULTS[name].is_planted_in(engine)
    ]
    able += 2 * [engine for engine in able if engine != SLOWEST]
    return able[turn % len(able)]


PAIRS = sorted(((engine_of(turn, name), name) for turn, name in enumerate(FAULTS)), key=lambda pair: pair[0])


@pytest.mark.parametrize(("engine", "name"), PAIRS, ids=[name for _, name in PAIRS])
def test_fault_is_caught(grid, request, engine, name):
    """The selected faults of an engine are one study: all have the same references."""
    alike = [one for one in request.session.items if "test_fault_is_caught[" in one.name]
    names = [one.callspec.params["name"] for one in alike if one.callspec.params["engine"] == engine]
    asked = ("faults", "--engines", engine, "--names", *names, *SHORT)
    outcome, case = read_outcome(grid.once(f"faults of {engine}", *asked, codes=(0, 1))), f"{name}.{engine}"
    assert case not in outcome.failures, outcome.failures[case]
    (row,) = (row for row in rows_of(outcome) if row.verdict.candidate == case)
    assert row.is_right, row.verdict.sentence()


def test_page_has_the_place_of_each_traced_fault():
    """A trace explains faults of the first forward or backward."""
    page = (ROOT / "docs" / "proof.md").read_text()
    table = page.partition("| fault | place |")[2].partition("\n\n")[0]
    named = {name for line in table.splitlines() for name in re.findall(r"`([^`]+)`", line.split("|")[1])}
    traced = {name for name, fault in FAULTS.items() if fault.rung in TRACED}
    assert named == {name for name in traced if FAULTS[name].is_planted_in("torch-manual")}


def test_fault_without_an_engine_is_an_error(tiny):
    with pytest.raises(ExperimentError, match="no fault is left to plant: dropped_all_reduce: jax-compiler"):
        fault_cases(tiny, ["jax-compiler"], names=["dropped_all_reduce"], devices=2)


def test_dry_run_prints_the_changed_lines(capsys):
    assert main(["faults", "--engines", "torch-manual", "--names", "stale_tied_copy", "--dry_run"]) == 0
    printed = capsys.readouterr().out
    (diff,) = FAULTS["stale_tied_copy"].diffs("torch-manual")
    assert f"+++ {diff.file}" in printed
    lines = [line.strip() for line in printed.splitlines()]
    assert f"-    {diff.old}" in lines
    assert f"+    {diff.new}" in lines


@pytest.mark.parametrize(
    ("loss", "gradients", "is_right"),
    [(0.0, 1.0, True), (1.0, 1.0, False), (0.0, 0.0, False)],
    ids=["at its rung", "too early", "nowhere"],
)
def test_fault_must_fail_first_at_its_rung(tiny, tmp_path, loss, gradients, is_right):
    coordinates = {"fault": "sum_for_mean"}
    case = Case(request=make_request(tiny), coordinates=coordinates, against="reference")
    results = [
        RungResult(rung=rung, error=error, tolerance=0.5, worst="")
        for rung, error in (("loss", loss), ("gradients", gradients))
    ]
    name = "sum_for_mean.torch-manual"
    verdict = Verdict(candidate=name, reference="reference", rungs=results)
    done = {"cases": {name: case}, "kept": {name: {1: {}}}, "verdicts": [verdict]}
    assert Faults.findings(outcome_of(tiny, **done), tmp_path).passed == is_right
    lost = outcome_of(tiny, **done, failures={"sum_for_mean.jax-manual": "lost"})
    assert not Faults.findings(lost, tmp_path).passed


def test_no_verdict_is_no_proof(tiny, tmp_path):
    assert not Faults.findings(outcome_of(tiny), tmp_path).passed
