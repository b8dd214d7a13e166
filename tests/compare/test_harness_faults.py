"""The harness's own checks: every record that is not what was asked for is red, and is not without them."""

import pytest
from records import make_record

from compare.judge import ladder
from compare.judge.ladder import REQUEST
from compare.spec.experiment import edited, load
from compare.studies.faults import Faults
from compare.studies.harness_faults import HARNESS_FAULTS, plant_all


@pytest.fixture
def trained(tmp_path, tiny):
    """A pair on two devices, and the candidate's engine on one."""
    train = {"max_iters": 5, "eval_interval": 2, "eval_iters": 1}
    changes = {"train": train, "optimizer": {"warmup_iters": 2}, "data": {"source": "synthetic"}}
    five = edited(tiny, changes)
    sharded = edited(five, {"layout": {"dp_replicate": 2}})
    make_record(tmp_path / "reference", sharded, engine="torch-manual")
    make_record(tmp_path / "candidate", sharded, engine="jax-manual")
    make_record(tmp_path / "single", five, engine="jax-manual")
    return tmp_path


def test_every_fault_of_the_harness_is_red_where_it_should_be(trained):
    control, *caught = plant_all(trained, trained / "planted")
    assert control.sentence == "PASS"
    assert [one.fault for one in caught] == list(HARNESS_FAULTS)
    assert [one.fault for one in caught if not one.is_right] == []
    assert all("inf" not in one.sentence for one in caught)


def test_without_the_request_most_of_them_would_pass(trained, monkeypatch):
    """The faults are real: it is the check against the request that sees them, and nothing else."""
    monkeypatch.setattr(ladder, "objections", lambda record: [])
    missed = [one.fault for one in plant_all(trained, trained / "planted")[1:] if not one.is_right]
    asked = {name for name, fault in HARNESS_FAULTS.items() if fault.rung == REQUEST}
    assert set(missed) == asked - {"another_dtype"}  # which is seen between the two


def test_by_default_the_pair_is_written_by_hand():
    """The number of a compiler's messages is held to nothing: `other_sync` passed in a pair of these."""
    cases, _ = Faults(harness=True).cases(load("check"))
    assert [case.engine for case in cases] == ["jax-manual", "torch-manual", "torch-manual"]


def test_the_command_plants_them_in_records_of_real_engines(shardpair):
    done = shardpair(
        "faults", "--harness", "--engines", "torch-manual", "torch-library", "--devices", "2",
        "--train.max_iters", "5", "--optimizer.warmup_iters", "2",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(HARNESS_FAULTS)} faults of the harness are red" in done.stdout
