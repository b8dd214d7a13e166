"""Runs whose tensors `shardpair runs --prune` removed: what goes, what is still judged, shown and refused."""

import json
from pathlib import Path

import msgspec
import pytest
import records
from records import make_record, make_run

from compare import study
from compare.api import read
from compare.cli import main
from compare.contract.record import Record, read_record
from compare.contract.request import REQUEST, Request
from compare.host.json_files import write_json
from compare.judge.outcome import read_outcome
from compare.present.tables import REMOVED
from compare.spec.experiment import edited, to_toml


@pytest.fixture
def passed(tmp_path, tiny):
    """A run that passed, with its tensors, and the size of them."""
    make_run(tmp_path / "run", tiny)
    return tmp_path / "run"


def tensors_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def pruned(told, folder: Path) -> None:
    assert told(folder, "--prune", "--yes")["removed"] is True
    assert tensors_in(folder) == []
    assert read_outcome(folder).tensors_removed


def test_tensors_of_a_run_that_passed_go_and_its_rungs_stay(passed, told, capsys):
    before, size = read_outcome(passed), sum(path.stat().st_size for path in tensors_in(passed))
    assert told(passed, "--prune")["bytes"] == size
    assert len(tensors_in(passed)) > 10
    pruned(told, passed)
    assert told(passed, "--prune")["removals"] == []
    assert main(["report", str(passed), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["tensors_removed"] is True
    assert shown["verdicts"] == json.loads(msgspec.json.encode(before.verdicts))
    assert main(["report", str(passed)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert REMOVED in said
    assert "PASS: jax-manual agrees" in said
    assert REMOVED in (passed / "report.html").read_text()


def test_tensors_behind_a_link_stay(passed, tmp_path, told):
    (passed / "jax-manual").rename(tmp_path / "elsewhere")
    (passed / "jax-manual").symlink_to(tmp_path / "elsewhere")
    (passed / "torch-manual" / "batch.safetensors").rename(tmp_path / "precious")
    (passed / "torch-manual" / "batch.safetensors").symlink_to(tmp_path / "precious")
    kept = len(tensors_in(tmp_path / "elsewhere"))
    assert told(passed, "--prune", "--yes")["removed"] is True
    assert len(tensors_in(tmp_path / "elsewhere")) == kept > 5
    assert (tmp_path / "precious").is_file()
    assert [path.name for path in tensors_in(passed / "torch-manual")] == ["batch.safetensors"]


def test_other_commands_read_a_run_without_tensors(passed, tmp_path, told, capsys, tiny):
    make_run(tmp_path / "whole", tiny)
    pruned(told, passed)
    assert main(["ledger", "--results", str(passed), "--json"]) == 0
    capsys.readouterr()
    assert main(["diff", str(passed), str(tmp_path / "whole"), "--json"]) == 0
    skipped = json.loads(capsys.readouterr().out)["pairs"]["jax-manual"]["verdict"]["skipped"]
    assert skipped["gradients"].startswith("no tensors of it in A: ")
    assert read(passed).passed
    with pytest.raises(ValueError, match="--keep_tensors"):
        read(passed)["jax-manual"].tensors("gradients")


def test_continuing_a_run_without_tensors_trains_nothing(passed, told, capsys, monkeypatch):
    monkeypatch.setattr(study, "launch", lambda *a, **k: pytest.fail("an engine was started"))
    pruned(told, passed)
    assert main(["run", "--continue", str(passed), "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors_removed"] is True


def test_a_run_removes_its_tensors_unless_they_are_to_be_kept(tmp_path, tiny, capsys, monkeypatch):
    def train(request: Request, folder: Path, **options) -> Record:
        monkeypatch.setattr(records, "CORPUS", request.corpus_sha256)
        make_record(folder, request.experiment, engine=request.engine)
        write_json(folder / REQUEST, request)
        return read_record(folder)

    monkeypatch.setattr(study, "launch", train)
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(to_toml(edited(tiny, {"data": {"source": "synthetic"}})))
    engines = ("--engines", "torch-manual", "torch-library", "--quiet")
    for name, flags in (("kept", ("--keep_tensors",)), ("gone", ())):
        assert main(["run", "tiny.toml", *engines, "--run_dir", name, *flags]) == 0
        assert bool(tensors_in(Path(name))) == (name == "kept")
        assert (REMOVED in " ".join(capsys.readouterr().out.split())) == (name == "gone")
