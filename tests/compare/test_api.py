"""The Python API: what docs/guide.md does, and how bad requests end."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare import api
from compare.cli import main
from compare.execute.launch import EngineError
from compare.judge.outcome import read_outcome
from compare.spec.experiment import ExperimentError, edited
from compare.system.tensors import RecordError
from tests.support.records import make_run

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"


@pytest.mark.usefixtures("warm_sides")
def test_guide_runs(tmp_path, monkeypatch, cache_dir, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", cache_dir)
    names: dict[str, Any] = {}
    for example in re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        exec(example, names)
    result = names["result"]
    said = capsys.readouterr().out
    assert "PASS: jax-manual and torch-manual compute the same" in said
    can_run, titles, *others = said.splitlines()[-5:]
    assert (can_run, others) == ("True", ["all 2 cases are alike", "True", "passed"])
    assert titles.startswith("['Loss over steps', 'Difference of the loss', ")
    assert names["slow"].optimizer.learning_rate == 1e-4
    assert (tmp_path / "loss.png").is_file()
    assert result.passed
    assert result.report.is_file()
    assert [training.name for training in result] == ["jax-manual", "torch-manual"]
    torch = result["torch-manual"]
    assert torch.loss.shape == torch.grad_norm.shape == torch.lr.shape == torch.step_time_ms.shape == (5,)
    assert torch.loss.dtype == np.float64
    assert torch.tensors("gradients")["embedding.token"].shape == (256, 16)
    assert max(result.errors()["torch-manual"].values()) <= 1e-10
    with pytest.raises(ValueError, match="gradient"):
        torch.tensors("gradient")
    again = api.read(result.folder)
    assert again.sentence() == result.sentence()
    assert repr(again).startswith("<Result runs/")


BAD = {
    "field": (
        lambda: api.experiment("check", train={"max_itres": 2}),
        "train.max_itres: no such field; did you mean max_iters?",
    ),
    "value": (lambda: api.experiment("check", model={"n_head": 5}), "n_head = 5 does not divide"),
    "option": (lambda: api.run("check", engine=["jax-manual"]), "engine: no such option"),
    "engine": (lambda: api.run("check", engines=["jax"]), "jax"),
    "devices": (lambda: api.check("check", devices=0), "^devices 0 must be at least 1"),
    "flag": (
        lambda: api.run("check", devices=2),
        "^devices has no effect without preset: give both, or neither",
    ),
    "switch": (
        lambda: api.run("check", keep_tensors=True, ladder=False),
        "^keep_tensors has no effect without ladder",
    ),
    "type": (lambda: api.check("check", devices="two"), '^devices = "two": give a whole number'),
    "list": (lambda: api.run("check", engines="jax-manual"), '^engines = "jax-manual": give a list'),
    "study": (lambda: api.study("benhc"), "^benhc: no such study; did you mean bench?"),
    "chip": (lambda: api.study("ledger", chip=["v5e:2x4"]), "^chip: no such option"),
    "none": (lambda: api.experiment("check", train={"max_iters": None}), "train.max_iters = None: give a wh"),
    "number": (lambda: api.experiment("check", model=3), r"^model = 3: give fields, such as model=\{"),
    "section": (lambda: api.experiment("check", modle={}), "^modle: no such section; did you mean model?"),
    "array": (
        lambda: api.experiment("check", train={"max_iters": np.arange(2)}),
        r"^train.max_iters = \[0, 1\]: give a whole number",
    ),
    "object": (
        lambda: api.experiment("check", data={"source": object()}),
        "^data.source = <object object at",
    ),
    "nan": (
        lambda: api.experiment("check", optimizer={"learning_rate": np.float64("nan")}),
        "^optimizer.learning_rate = nan must be a finite number",
    ),
    "dry run": (lambda: api.dry_run("run", "check", preset="nosuch"), "^preset nosuch: no such preset"),
}


@pytest.mark.parametrize(("call", "words"), BAD.values(), ids=BAD)
def test_bad_request_is_one_line(tmp_path, monkeypatch, call, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ExperimentError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_settings_are_read_and_built(tmp_path):
    with pytest.raises(RecordError, match=r"has no outcome\.json"):
        api.read(tmp_path)
    built = api.experiment("demo", train={"max_iters": 7})
    assert (built.train.max_iters, built.model) == (7, api.experiment("demo").model)


def test_experiment_is_varied(tmp_path):
    """Each has its own value; numbers of NumPy and paths are Python's; the first stays."""
    tiny = api.experiment("check", train={"max_iters": np.int64(5)}, model={"bias": np.True_})
    text = tmp_path / "text"
    rates = [
        api.experiment(tiny, optimizer={"learning_rate": rate}, data={"source": text})
        for rate in np.array([0.5, 0.25])
    ]
    assert [one.optimizer.learning_rate for one in rates] == [0.5, 0.25]
    assert {(one.train.max_iters, one.model.bias, one.data.source) for one in rates} == {(5, True, str(text))}
    assert all(type(one.optimizer.learning_rate) is float for one in rates)
    assert (tiny.data.source, api.experiment(tiny)) == ("stdlib", tiny)


NAMES = ["torch-manual", "jax-manual"]


@pytest.fixture
def evaluated(tiny):
    return edited(tiny, {"train": {"eval_interval": 2, "eval_iters": 1}})


def test_failed_case_is_continued(engines, evaluated):
    """The result of a study, continued from Python: its values, its page, its curves."""
    engines.failing = {"jax-manual": EngineError("jax-manual: lost", exit_code=1)}
    first = api.run(evaluated, engines=NAMES, quiet=np.True_, run_dir=Path("r"))
    assert (first.passed, len(first.trainings), first.folder) == (False, 1, Path("r"))
    engines.failing, engines.started = {}, []
    with pytest.raises(ExperimentError, match=r"^continue r goes on with .*: leave out engines"):
        api.continue_study("r", engines=NAMES)
    result = api.continue_study(first.folder, quiet=True)
    assert (result.passed, len(result.trainings), engines.started) == (True, 2, ["jax-manual"])
    assert read_outcome(Path("r")).passed
    training = result["jax-manual"]
    assert training.step.tolist() == [0, 1, 2]
    assert training.evaluated_after.tolist() == [0, 2, 3]
    assert training.validation_loss.dtype == training.train_loss.dtype == np.float64
    assert training.validation_loss.tolist() == [one.validation for one in training.record.evaluations]
    assert result != api.read("r")
    with pytest.raises(RecordError, match=r"has no outcome\.json"):
        api.continue_study("nosuch")


def test_result_is_the_object_of_json(engines, capsys):
    result = api.run("tiny.toml", engines=NAMES, quiet=True, run_dir="r")
    capsys.readouterr()
    assert main(["report", "r", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert json.loads(json.dumps(api.read("r").to_dict())) == shown
    assert result.to_dict() == shown
    assert shown["page"] == str(result.report) == "r/report.html"


@pytest.mark.usefixtures("with_pictures")
def test_notebook_shows_tables_and_figures(tmp_path, tiny):
    make_run(tmp_path / "r", tiny, names=NAMES)
    make_run(tmp_path / "far", tiny, names=NAMES, missing=("torch-library",))
    result = api.read(tmp_path / "r")
    shown = result._repr_html_()
    assert shown.count("<table") == 2
    assert f'<p class="pass"><strong>{result.sentence()}</strong></p>' in shown
    assert '<th scope="row">gradients' in shown
    far = api.read(tmp_path / "far")._repr_html_()
    assert '<p class="fail"><strong>INCOMPLETE' in far
    assert "&lt;b&gt;no&lt;/b&gt; luck" in far
    assert [figure.title for figure in result.figures][:2] == ["Loss over steps", "Difference of the loss"]
    assert result.figure().title == "Loss over steps"
    drawn = result.figure("difference")._repr_html_()
    assert drawn.startswith("<svg")
    assert "Difference of the loss" in drawn
    with pytest.raises(ValueError, match=r"a run has no figure bubbles \(there are Loss over steps, Diff"):
        result.figure("bubbles")


def test_dry_run_starts_nothing(engines, folder_of_tiny):
    plan = api.dry_run("run", "tiny.toml", engines=NAMES, preset="ddp", devices=2)
    assert plan.passed
    assert plan.to_dict()["cases"]["jax-manual"]["state"] == "planned"
    assert "2 cases of 3 steps; nothing was started" in repr(plan)
    assert "all of it can run" in plan._repr_html_()
    far = api.dry_run("run", "tiny.toml", engines=NAMES[:1], preset="ddp", hosts=2, launcher="slurm")
    assert "start it with `salloc --nodes=2` and this command without --dry_run" in far.findings.notes
    assert (far.passed, far.to_dict()["values"]["batch_script"]) == (True, "")
    refused = api.dry_run("run", "tiny.toml", engines=NAMES[:1], init_from="nosuch")
    assert (refused.passed, refused.to_dict()["cases"]["torch-manual"]["state"]) == (False, "planned")
    assert "nosuch does not exist" in refused._repr_html_()
    assert engines.started == []
    assert [path.name for path in folder_of_tiny.iterdir()] == ["tiny.toml"]


def test_diff_of_two_results(tmp_path, tiny):
    make_run(tmp_path / "a", tiny, names=NAMES)
    make_run(tmp_path / "b", edited(tiny, {"optimizer": {"beta1": 0.8}}), names=NAMES)
    found = api.diff(api.read(tmp_path / "a"), tmp_path / "b")
    assert list(found.differences) == NAMES
    assert found.differences["jax-manual"].settings["optimizer.beta1"] == ("0.9", "0.8")
    assert found.passed is all(one.verdict.passed for one in found.differences.values())
    assert "optimizer.beta1" in found._repr_html_()
