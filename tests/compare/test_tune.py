"""`shardpair tune`: what is timed, when a case is given up, how a ranking is judged, and the winner."""

import json
from pathlib import Path

import msgspec
import pytest
from benches import bench_of, measurement_of
from machines import machine_of
from msgspec.structs import replace
from records import make_request

from compare.cli import main
from compare.judge.outcome import Case, Outcome, read_outcome
from compare.plan.machine import Machine, read_machine
from compare.plan.predict import predict
from compare.plan.search import search
from compare.spec.experiment import load
from compare.studies.tune import accuracy, kendall, rows_of

HERE = ("tune", "tiny.toml", "--machine", "here.toml", "--quiet", "--anyway")


def tuned(experiment, times: dict[str, list[float]], *, predicted=None) -> Outcome:
    """Cases by layout, and the ms of each in each round."""
    cases = [Case(request=make_request(experiment), layout=name) for name in times]
    done = [
        measurement_of(case, number, wall_ms=wall)
        for case in cases
        for number, wall in enumerate(times[case.layout], 1)
    ]
    predicted_ms = {case.name: (predicted or {}).get(case.layout, 10.0) for case in cases}
    outcome = bench_of(cases, measurements=done)
    return replace(outcome, more={**outcome.more, "predicted_ms": predicted_ms})


def test_predictions_are_held_against_medians(tiny):
    times = {"a": [10, 12, 11], "b": [20, 20, 20], "c": [40, 40, 40]}
    rows = rows_of(tuned(tiny, times, predicted={"a": 5.5, "b": 10, "c": 80}))
    assert [row.error for row in rows] == pytest.approx([-0.5, -0.5, 1.0])
    assert accuracy(rows) == (
        "3 layouts, median error 50%, worst 100%, after one factor 0%, worst 300%, Kendall's tau 1.00"
    )
    reverse = rows_of(tuned(tiny, times, predicted={"a": 3, "b": 2, "c": 1}))
    assert accuracy(reverse).endswith("tau -1.00")


def test_kendalls_tau_is_none_where_there_is_no_order():
    assert kendall([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0]) == pytest.approx(2 / 3)
    assert kendall([1.0, 2.0], [1.0, 2.0]) is None  # of two it is 1 or -1, whatever was predicted
    assert kendall([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None


@pytest.fixture
def here(timed_engines) -> Machine:
    """A machine of two devices in a file, as tune keeps it."""
    machine = machine_of(2, platform="cpu", peak={"float64": 1e10}, memory_bytes_per_s=1e9)
    Path("here.toml").write_bytes(msgspec.toml.encode(machine))
    return read_machine("here.toml")


def test_it_plans_times_and_leaves_the_winner(here, timed_engines, capsys):
    assert main([*HERE, "--best", "3", "--rounds", "2", "--run_dir", "t", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"]
    outcome = read_outcome(Path("t"))
    best = search("torch-manual", outcome.experiment, here, fixed=frozenset()).fitting[:3]
    assert [case.layout for case in outcome.cases.values()] == [one.name for one in best]
    for (name, case), one in zip(outcome.cases.items(), best, strict=True):
        seconds = predict("torch-manual", case.experiment, here).seconds
        assert outcome.more["predicted_ms"][name] == pytest.approx(1e3 * seconds)
        assert seconds == pytest.approx(one.seconds)
    assert len(timed_engines.started) == 6
    winner = load("t/winner.toml")
    assert winner.layout in [one.layout for one in best]
    assert winner.train.max_iters == outcome.experiment.train.max_iters
    assert msgspec.toml.decode(Path("t/here-torch-manual.toml").read_bytes(), type=Machine) == here
    assert main(["report", "t"]) == 0
    assert "Predicted and measured" in capsys.readouterr().out


def test_what_cannot_be_tuned_is_refused_in_a_line(here, capsys):
    for arguments, says in (
        (("--devices", "4"), "has 2 devices, --devices 4"),
        (("--machine", "here", "--dry_run"), "--dry_run measures nothing"),
        (("--machine", "none.toml"), "does not exist"),
    ):
        assert main([*HERE, *arguments]) == 2
        error = capsys.readouterr().err
        assert says in " ".join(error.split())
        assert "Traceback" not in error
