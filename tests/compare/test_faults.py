"""A check that cannot fail is no check: every known mistake, in every engine that can make it.

That the same is green with nothing planted, test_check.py says.
"""

import json

import pytest

from compare.commands.faults import FAULTS, caught_as_expected, fault_cases
from compare.judge.ladder import LADDER, RungResult, Verdict
from compare.judge.outcome import Case
from compare.spec.engines.registry import JAX, STUDIED
from compare.spec.experiment import ExperimentError
from tests.support.grid import TEXT
from tests.support.records import make_request, outcome_of

IN_JAX = {
    "moved_weight", "reversed_update", "ignored_bucket_mb", "ignored_offload", "ignored_sequence_parallel",
    "ignored_dtype",
}  # fmt: skip
"""The faults that this test plants in JAX, where each is a step to compile."""


SLOWEST = "torch-compiler"
"""Of torchpar's engines, on models so small: its turn comes seldom."""
SHORT = ("--train.max_iters", "4", "--data.source", str(TEXT))


def planted_in(engine: str) -> list[str]:
    """The faults that this test plants in an engine; `shardpair faults` plants each of them in all.

    Each comes once, in one of the engines of its side that can make it, in turn.
    """
    side, chosen = STUDIED[engine].side, []
    for turn, name in enumerate(name for name in FAULTS if (name in IN_JAX) == (side == JAX.name)):
        engines = [other for other in STUDIED.values() if other.side == side]
        able = [other.name for other in engines if other.name not in FAULTS[name].impossible]
        able += 2 * [other for other in able if other != SLOWEST]
        if able[turn % len(able)] == engine:
            chosen.append(name)
    return chosen


@pytest.mark.parametrize("engine", [engine for engine in STUDIED if planted_in(engine)])
def test_every_planted_fault_is_caught_at_its_rung(shardpair, engine):
    names = planted_in(engine)
    done = shardpair("faults", "--engines", engine, "--devices", "2", "--names", *names, *SHORT, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    caught = {}
    for verdict in json.loads(done.stdout)["verdicts"]:
        failed = [
            result["rung"]
            for result in verdict["rungs"]
            if result["error"] is None or result["error"] > result["tolerance"]  # null: infinite
        ]
        caught[verdict["candidate"].rpartition(".")[0]] = min(failed, key=LADDER.index)
    assert caught == {name: FAULTS[name].rung for name in names}


def test_no_fault_is_planted_nowhere(tiny):
    with pytest.raises(ExperimentError, match="no fault is left to plant: dropped_all_reduce: jax-compiler"):
        fault_cases(tiny, ["jax-compiler"], names=["dropped_all_reduce"], devices=2)
    assert {name for engine in STUDIED for name in planted_in(engine)} == set(FAULTS)


def test_a_fault_is_caught_at_its_own_rung_or_not_at_all(tiny):
    case = Case(request=make_request(tiny), against="reference")
    for loss, gradients, is_right in ((0.0, 1.0, True), (1.0, 1.0, False), (0.0, 0.0, False)):
        results = [
            RungResult(rung=rung, error=error, tolerance=0.5, worst="")
            for rung, error in (("loss", loss), ("gradients", gradients))
        ]
        verdict = Verdict(candidate="sum_for_mean.torch-manual", reference="reference", rungs=results)
        name = verdict.candidate
        done = {"cases": {name: case}, "kept": {name: {1: {}}}, "verdicts": [verdict]}
        assert caught_as_expected(outcome_of(tiny, **done)) == is_right
        failed = outcome_of(tiny, **done, failures={"sum_for_mean.jax-manual": "lost"})
        assert not caught_as_expected(failed)
    assert not caught_as_expected(outcome_of(tiny))
