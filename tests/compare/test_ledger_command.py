"""`shardpair ledger` over a finished run: what is not expected is named, and fails if that is asked for."""

import msgspec
import pytest

from compare.cli import main
from compare.contract.ledger import Ledger
from compare.contract.record import LEDGER, read_record
from compare.judge.alone import judged
from compare.judge.outcome import read_outcome, save
from compare.spec.experiment import edited
from compare.system.json_files import read_json, write_json
from tests.support.records import make_run


@pytest.fixture
def run(tmp_path, tiny):
    """Two engines, fully sharded, that send what they should."""
    make_run(tmp_path / "run", edited(tiny, {"layout": {"dp_shard": 2, "zero": 3}}), study="ledger")
    return tmp_path / "run"


def test_unexpected_flow_is_named(run, capsys):
    path = run / "torch-manual" / LEDGER
    twice = [msgspec.structs.replace(row, bytes=2 * row.bytes) for row in read_json(path, Ledger).rows]
    write_json(path, Ledger(rows=twice, problems=["a loop has no known trip count, at mine.py:3"]))
    outcome, other = read_outcome(run), judged(read_record(path.parent))
    save(msgspec.structs.replace(outcome, alone=outcome.alone | {other.name: other.alone}), run)
    assert main(["ledger", "--results", str(run)]) == 0
    assert main(["ledger", "--results", str(run), "--fail_on_unexpected"]) == 1
    shown = capsys.readouterr().out
    assert "2 of 4 flows are the textbook's to the byte" in shown
    assert "the others 1.00 to 2.00 times (docs/compilers.md)" in shown
    assert "torch-manual: the ledger: it is incomplete: a loop has no known trip count, at mine.py:3" in shown


def test_a_finished_run_has_its_own_layout(run, capsys):
    for flags in (("--preset", "ddp"), ("--model.n_layer", "3")):
        assert main(["ledger", "--results", str(run), *flags]) == 2
        assert "leave out the layout and the experiment" in capsys.readouterr().err
