"""A run that passed removes its tensors, and nothing else."""

import json
from pathlib import Path

import msgspec
import pytest

from compare.api import read
from compare.cli import main
from compare.commands.report.page import REMOVED
from compare.commands.run import Run
from compare.contract.record import Record, read_record
from compare.contract.request import REQUEST, Request, Rung
from compare.judge.outcome import read_outcome, save
from compare.run import study
from compare.spec.experiment import edited, parse, to_toml
from compare.system.json_files import write_json
from tests.support import records
from tests.support.records import make_record, make_run, tensors_of


@pytest.fixture
def passed(tmp_path, tiny):
    make_run(tmp_path / "run", tiny)
    return tmp_path / "run"


def remove_tensors(folder: Path) -> None:
    """As a run does when all of its cases have finished."""
    save(Run().end(read_outcome(folder), folder), folder)


def tensors_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def test_passed_run_keeps_rungs_without_tensors(passed, tmp_path, tiny, capsys, monkeypatch):
    before = read_outcome(passed)
    assert len(tensors_in(passed)) > 10
    remove_tensors(passed)
    assert tensors_in(passed) == []
    assert main(["report", str(passed), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["tensors_removed"] is True
    assert shown["verdicts"] == json.loads(msgspec.json.encode(before.verdicts))
    assert REMOVED in (passed / "report.html").read_text()
    # Other commands read it; --continue trains nothing.
    make_run(tmp_path / "whole", tiny)
    assert main(["diff", str(passed), str(tmp_path / "whole"), "--json"]) == 0
    skipped = json.loads(capsys.readouterr().out)["pairs"]["jax-manual"]["verdict"]["skipped"]
    assert "has no tensors of it: `shardpair run --keep_tensors`" in skipped["gradients"]
    with pytest.raises(ValueError, match="--keep_tensors"):
        read(passed)["jax-manual"].tensors("gradients")
    monkeypatch.setattr(study, "launch", lambda *a, **k: pytest.fail("an engine was started"))
    assert main(["run", "--continue", str(passed), "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors_removed"] is True


@pytest.mark.parametrize("how", ["failed", "lacks", "alone"])
def test_unproven_run_keeps_tensors(tmp_path, tiny, how):
    wrong = tensors_of(tiny)
    wrong[Rung.GRADIENTS] = {name: tensor + 1 for name, tensor in wrong[Rung.GRADIENTS].items()}
    runs = {"failed": {"tensors": wrong}, "lacks": {"missing": ("torch-library",)}}
    make_run(tmp_path / how, tiny, **runs.get(how, {"names": ("torch-manual",)}))
    before = tensors_in(tmp_path)
    remove_tensors(tmp_path / how)
    assert tensors_in(tmp_path) == before


def test_keep_tensors_keeps_them(tmp_path, tiny, capsys, monkeypatch):
    def train(request: Request, folder: Path, **options) -> Record:
        monkeypatch.setattr(records, "CORPUS", request.corpus_sha256)
        record = make_record(folder, request.experiment, engine=request.engine)
        options["on_step"](record.steps[0])
        write_json(folder / REQUEST, request)
        return read_record(folder)

    monkeypatch.setattr(study, "launch", train)
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(to_toml(edited(tiny, {"data": {"source": "synthetic"}})))
    engines = ("--engines", "torch-manual", "torch-library", "--quiet")
    for name, flags in (("kept", ("--keep_tensors",)), ("gone", ())):
        assert main(["run", "tiny.toml", *engines, "--run_dir", name, *flags]) == 0
        assert bool(tensors_in(Path(name))) == (name == "kept")
        spec = parse((Path(name) / "experiment.toml").read_text())
        assert spec.model == tiny.model
        assert (REMOVED in " ".join(capsys.readouterr().out.split())) == (name == "gone")
