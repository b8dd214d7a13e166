"""`shardpair ledger` over finished runs: what it prints, its exit codes, and what it refuses."""

import msgspec
import pytest
from records import make_ledger, make_record, make_request, outcome_of

from compare.cli import main
from compare.contract.ledger import Ledger
from compare.contract.record import LEDGER
from compare.host.json_files import write_json
from compare.judge.outcome import Case, save, with_case
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


def test_a_finished_run_has_its_own_layout(run, capsys):
    for flags in (("--preset", "ddp"), ("--model.n_layer", "3")):
        assert main(["ledger", "--results", str(run), *flags]) == 2
        assert "leave out the layout and the experiment" in capsys.readouterr().err
