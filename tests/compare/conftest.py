"""What the tests of the harness share."""

import json
from collections.abc import Callable

import pytest
from timed_engines import Engines
from warm import EMPTY_SVG

from compare.cli import main
from compare.execute import load
from compare.spec.experiment import Experiment, edited, to_toml
from compare.studies import one_process

FOUR = {"model": {"n_layer": 2, "n_head": 4}, "train": {"batch_size": 8, "max_iters": 3}}


@pytest.fixture
def with_pictures() -> None:
    """Pages have their pictures, each of which takes a tenth of a second: for tests of what is drawn."""


@pytest.fixture(autouse=True)
def only_named_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of pages have their names and nothing in them, unless the test asks for them."""
    if "with_pictures" not in request.fixturenames:
        monkeypatch.setattr("compare.present.report.canvas._svg_file", lambda figure, *, salt: EMPTY_SVG)


@pytest.fixture
def small(tiny: Experiment) -> Experiment:
    """An experiment that four devices can share in every way."""
    return edited(tiny, FOUR)


@pytest.fixture
def timed_engines(tmp_path, monkeypatch, tiny) -> Engines:
    """Made-up engines in the place of `launch`, on an idle machine, and tiny.toml in the working folder."""
    made_up = Engines()
    monkeypatch.setattr(one_process, "launch", made_up)
    monkeypatch.setattr(load, "busy_cores", lambda: 0.0)
    monkeypatch.setattr(load.LoadBeside, "cores", lambda self: 0.0)
    monkeypatch.setattr(one_process, "measure_ceiling", made_up.ceiling)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(to_toml(tiny))
    return made_up


@pytest.fixture
def told(capsys) -> Callable[..., dict]:
    """What `shardpair runs ARGUMENTS --json` says."""

    def runs(*arguments: object) -> dict:
        assert main(["runs", *map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return runs
