"""The Python API: what docs/guide.md does, and how bad requests end."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare import api
from compare.spec.experiment import ExperimentError
from compare.system.tensors import RecordError

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"


@pytest.mark.usefixtures("warm_sides")
def test_guide_runs(tmp_path, monkeypatch, cache_dir, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", cache_dir)
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    result = names["result"]
    assert "PASS: jax-manual and torch-manual compute the same" in capsys.readouterr().out
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
    "devices": (lambda: api.check("check", devices=0), "--devices 0 must be at least 1"),
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
