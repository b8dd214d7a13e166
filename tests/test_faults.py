"""A check that cannot fail is no check: every known mistake, in every engine that can make it."""

import json

import pytest

from compare.contract.engines import ENGINES
from compare.faults import FAULTS
from compare.numerics import RUNGS

# A wrong value in the spec is the same mistake in both engines of a side: one of them plants it here, and
# `make faults` all. A mistake in an engine's own code is planted in every engine that can make it.
EDITS_IN = ("jax-compiler", "torch-manual")


def planted_in(engine: str) -> list[str]:
    """The faults that this test plants in an engine."""
    return [
        name
        for name, fault in FAULTS.items()
        if engine not in fault.impossible_in and (fault.edit is None or engine in EDITS_IN)
    ]


@pytest.mark.parametrize("engine", list(ENGINES))
def test_every_planted_fault_is_caught_at_its_rung(shardpair, engine):
    names = planted_in(engine)
    done = shardpair("faults", "--engines", engine, "--devices", "2", "--names", *names, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    caught = {}
    for verdict in json.loads(done.stdout)["verdicts"]:
        failed = [result["rung"] for result in verdict["rungs"] if not result["error"] <= result["tolerance"]]
        caught[verdict["candidate"].rpartition(".")[0]] = min(failed, key=RUNGS.index)
    assert caught == {name: FAULTS[name].rung for name in names}


def test_no_fault_is_planted_nowhere():
    assert {name for engine in ENGINES for name in planted_in(engine)} == set(FAULTS)


def test_an_engine_without_a_fault_passes(shardpair):
    """The other half of the proof: the same experiment, nothing planted, is green."""
    done = shardpair("check", "--devices", "2", "--engines", "torch-library", "--train.max_iters", "2")
    assert done.returncode == 0, done.stdout + done.stderr
