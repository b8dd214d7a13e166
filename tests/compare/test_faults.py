"""Planted faults are caught: each once, in one of the engines that can make it.

`shardpair faults` plants each in all engines.
"""

import json

import pytest

from compare.commands.faults import FAULTS, caught_as_expected, fault_cases
from compare.judge.outcome import Case
from compare.judge.rungs import RungResult, Verdict
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


PAIRS = [(name, engine_of(turn, name)) for turn, name in enumerate(FAULTS)]


@pytest.mark.parametrize(("name", "engine"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
def test_fault_is_caught_at_its_rung(shardpair, name, engine):
    done = shardpair("faults", "--engines", engine, "--names", name, *SHORT, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (verdict,) = json.loads(done.stdout)["verdicts"]
    assert verdict["candidate"] == f"{name}.{engine}"


@pytest.mark.parametrize("engine", ["jax-manual", "torch-library", "torch-compiler"])
def test_run_without_a_fault_passes(shardpair, engine):
    same = ("--train.max_iters", "3", "--model.dropout", "0.2", "--preset", "ddp", *SHORT)
    done = shardpair("run", "check", "--engines", "torch-manual", engine, *same)
    assert done.returncode == 0, done.stdout + done.stderr


def test_fault_without_an_engine_is_an_error(tiny):
    with pytest.raises(ExperimentError, match="no fault is left to plant: dropped_all_reduce: jax-compiler"):
        fault_cases(tiny, ["jax-compiler"], names=["dropped_all_reduce"], devices=2)


def test_dry_run_prints_the_changed_lines(shardpair):
    done = shardpair("faults", "--engines", "torch-manual", "--names", "stale_tied_copy", "--dry_run")
    assert done.returncode == 0, done.stdout + done.stderr
    (diff,) = FAULTS["stale_tied_copy"].diffs("torch-manual")
    assert f"+++ {diff.file}" in done.stdout
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert f"-    {diff.old}" in lines
    assert f"+    {diff.new}" in lines


@pytest.mark.parametrize(
    ("loss", "gradients", "is_right"),
    [(0.0, 1.0, True), (1.0, 1.0, False), (0.0, 0.0, False)],
    ids=["at its rung", "too early", "nowhere"],
)
def test_fault_must_fail_first_at_its_rung(tiny, loss, gradients, is_right):
    coordinates = {"fault": "sum_for_mean"}
    case = Case(request=make_request(tiny), coordinates=coordinates, against="reference")
    results = [
        RungResult(rung=rung, error=error, tolerance=0.5, worst="")
        for rung, error in (("loss", loss), ("gradients", gradients))
    ]
    name = "sum_for_mean.torch-manual"
    verdict = Verdict(candidate=name, reference="reference", rungs=results)
    done = {"cases": {name: case}, "kept": {name: {1: {}}}, "verdicts": [verdict]}
    assert caught_as_expected(outcome_of(tiny, **done)) == is_right
    assert not caught_as_expected(outcome_of(tiny, **done, failures={"sum_for_mean.jax-manual": "lost"}))


def test_no_verdict_is_no_proof(tiny):
    assert not caught_as_expected(outcome_of(tiny))
