"""A run that passed removes its tensors, and nothing else."""

import json
from pathlib import Path

import msgspec
import pytest

from compare.api import read
from compare.cli import main
from compare.commands.run import Run
from compare.commands.run.page import REMOVED
from compare.contract.request import Rung
from compare.judge.outcome import read_outcome, save
from compare.spec.experiment import parse
from tests.support.records import make_run, tensors_of


@pytest.fixture
def passed(tmp_path, tiny):
    make_run(tmp_path / "run", tiny)
    return tmp_path / "run"


def remove_tensors(folder: Path) -> None:
    """As a run does when all of its cases have finished."""
    save(Run().end(read_outcome(folder), folder), folder)


def tensors_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def test_passed_run_keeps_rungs_without_tensors(passed, engines, tmp_path, tiny, capsys):
    before = read_outcome(passed)
    assert len(tensors_in(passed)) > 10
    remove_tensors(passed)
    assert tensors_in(passed) == []
    assert main(["report", str(passed), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["values"]["outcome"]
    assert shown["tensors_removed"] is True
    assert shown["verdicts"] == json.loads(msgspec.json.encode(before.verdicts))
    assert REMOVED in (passed / "report.html").read_text()
    # Other commands read it; --continue trains nothing.
    make_run(tmp_path / "whole", tiny)
    assert main(["diff", str(passed), str(tmp_path / "whole"), "--json"]) == 0
    skipped = json.loads(capsys.readouterr().out)["values"]["pairs"]["jax-manual"]["verdict"]["skipped"]
    assert "has no tensors of it: `shardpair run --keep_tensors`" in skipped["gradients"]
    with pytest.raises(ValueError, match="run with ladder=True and keep_tensors=True"):
        read(passed)["jax-manual"].tensors("gradients")
    assert main(["run", "--continue", str(passed), "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["values"]["outcome"]["tensors_removed"] is True
    assert engines.started == []


@pytest.mark.parametrize("how", ["failed", "lacks", "alone"])
def test_unproven_run_keeps_tensors(tmp_path, tiny, how):
    wrong = tensors_of(tiny)
    wrong[Rung.GRADIENTS] = {name: tensor + 1 for name, tensor in wrong[Rung.GRADIENTS].items()}
    runs = {"failed": {"tensors": wrong}, "lacks": {"missing": ("torch-library",)}}
    make_run(tmp_path / how, tiny, **runs.get(how, {"names": ("torch-manual",)}))
    before = tensors_in(tmp_path)
    remove_tensors(tmp_path / how)
    assert tensors_in(tmp_path) == before


@pytest.mark.parametrize("flags", [["--keep_tensors"], []], ids=["kept", "removed"])
@pytest.mark.usefixtures("engines")
def test_flag_keeps_tensors(tiny, capsys, flags):
    asked = ["run", "tiny.toml", "--engines", "torch-manual", "torch-library", "--quiet", "--run_dir", "r"]
    assert main([*asked, *flags]) == 0
    assert bool(tensors_in(Path("r"))) == bool(flags)
    assert parse((Path("r") / "experiment.toml").read_text()).model == tiny.model
    assert (REMOVED in " ".join(capsys.readouterr().out.split())) == (not flags)
