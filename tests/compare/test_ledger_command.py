"""`shardpair ledger` over finished runs: what it prints, its exit codes, and what it refuses."""

import json

import msgspec
import pytest
from records import make_ledger, make_record, make_request, outcome_of

from compare.cli import main
from compare.contract.ledger import Ledger
from compare.contract.record import LEDGER
from compare.host.json_files import write_json
from compare.judge.outcome import Case, read_outcome, save, with_case
from compare.spec.experiment import edited

ENGINES = ("jax-manual", "torch-manual")


@pytest.fixture
def run(tmp_path, tiny):
    """Two engines, fully sharded, that send what they should."""
    experiment = edited(tiny, {"layout": {"dp_shard": 2, "zero": 3}})
    folder = tmp_path / "run"
    folder.mkdir()
    outcome = outcome_of(experiment, study="ledger")
    for engine in ENGINES:
        record = make_record(folder / engine, experiment, engine=engine)
        cases = {**outcome.cases, engine: Case(request=make_request(experiment, engine=engine))}
        outcome = with_case(msgspec.structs.replace(outcome, cases=cases), engine, {}, record, folder)
        place = {"source": "model.py:7 (forward): blocks", "loops": (2, 4)}
        rows = [msgspec.structs.replace(row, **place) for row in make_ledger(engine, experiment)]
        write_json(folder / engine / LEDGER, Ledger(rows=rows))
    save(outcome, folder)
    return folder


def test_a_run_that_sends_what_it_should(run, capsys):
    assert main(["ledger", "--results", str(run), "--rows", "--fail_on_unexpected"]) == 0
    shown = capsys.readouterr().out
    assert "fully sharded over 2: 2 CPU devices" in shown
    assert "2 cases; 4 of 4 flows are the textbook's to the byte" in shown
    assert "model.py:7 (forward): blocks" in shown
    assert "2 x 4" in shown
    assert main(["ledger", "--results", str(run), "--json"]) == 0
    study = json.loads(capsys.readouterr().out)
    (first, second) = study["ledgers"]
    assert not study["missing"]
    assert [flow["textbook"] for flow in first["flows"]] == [flow["sent"] for flow in first["flows"]]
    assert second["engine"] == "torch-manual"


def test_a_surprise_is_named_and_fails_if_asked(run, capsys):
    path = run / "torch-manual" / LEDGER
    ledger = msgspec.json.decode(path.read_bytes(), type=Ledger)
    twice = [msgspec.structs.replace(row, bytes=2 * row.bytes) for row in ledger.rows]
    write_json(path, Ledger(rows=twice, problems=["a loop has no known trip count, at mine.py:3"]))
    assert main(["ledger", "--results", str(run)]) == 0
    assert main(["ledger", "--results", str(run), "--fail_on_unexpected"]) == 1
    shown = capsys.readouterr().out
    assert "2 of 4 flows are the textbook's to the byte, the others 1.00 to 2.00 times" in shown
    assert "torch-manual: incomplete: a loop has no known trip count, at mine.py:3" in shown


def test_who_has_no_ledger_is_named(run, capsys):
    """A case that failed, one whose turn did not come, one that cannot be: printed, in JSON."""
    outcome = read_outcome(run)
    others = dict.fromkeys(("torch-library", "jax-compiler"), outcome.cases["jax-manual"])
    failed = msgspec.structs.replace(
        outcome,
        cases=outcome.cases | others,
        failures={"torch-library": "rank 1 died"},
        left_out={"plain-jit": "it has one device"},
    )
    save(failed, run)
    assert main(["ledger", "--results", str(run)]) == 1
    shown = capsys.readouterr().out
    assert "MISSING: torch-library, jax-compiler" in shown
    assert "plain-jit: it has one device" in shown
    assert "torch-library is MISSING: it did not finish: rank 1 died" in shown
    assert main(["ledger", "--results", str(run), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["missing"] == {
        "torch-library": "did not finish: rank 1 died",
        "jax-compiler": "did not run",
    }


def test_a_finished_run_has_its_own_layout(run, capsys):
    for flags in (("--preset", "ddp"), ("--model.n_layer", "3")):
        assert main(["ledger", "--results", str(run), *flags]) == 2
        assert "leave out the layout and the experiment" in capsys.readouterr().err


def test_what_cannot_be_asked_for_is_refused(capsys, tmp_path):
    assert main(["ledger", "--preset", "ddp", "--presets", "fsdp"]) == 2
    assert "give one of them" in capsys.readouterr().err
    assert main(["ledger", "--results", str(tmp_path)]) == 2
    assert "is not the folder of a `shardpair run`" in capsys.readouterr().err
    assert main(["ledger", "--presets", "nothing"]) == 2
    assert "--presets nothing: no such preset" in capsys.readouterr().err
