"""Fixtures of the tests of the harness."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from markupsafe import Markup

from compare.execute import cpu_load
from compare.run import study
from compare.spec.experiment import Experiment, edited, to_toml
from tests.support.made_up import Engines
from tests.support.records import CORPUS
from tests.support.warm import EMPTY_SVG

FOUR = {"model": {"n_layer": 2, "n_head": 4}, "train": {"batch_size": 8, "max_iters": 3}}


@pytest.fixture
def with_pictures() -> None:
    """Pages have their pictures, each of which takes a tenth of a second: for tests of what is drawn."""


@pytest.fixture(autouse=True)
def only_named_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of pages have their names and nothing in them, unless the test asks for them."""
    if "with_pictures" not in request.fixturenames:
        monkeypatch.setattr("compare.show.page.svg", lambda figure: Markup(EMPTY_SVG))


@pytest.fixture
def small(tiny: Experiment) -> Experiment:
    """An experiment that four devices can share in every way."""
    return edited(tiny, FOUR)


@pytest.fixture
def folder_of_tiny(tmp_path, monkeypatch, tiny) -> Path:
    """The working folder, with tiny.toml in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(to_toml(tiny))
    return tmp_path


@pytest.fixture
def engines(folder_of_tiny, monkeypatch) -> Engines:
    """Made-up engines, on an idle machine."""
    made_up = Engines()
    monkeypatch.setattr(study, "launch", made_up)
    monkeypatch.setattr(study, "prepare", lambda asked, at: (asked.data, CORPUS))
    monkeypatch.setattr(study, "open_corpus", lambda one: SimpleNamespace(sha256=CORPUS))
    monkeypatch.setattr(cpu_load, "busy_cores", lambda: 0.0)
    monkeypatch.setattr(cpu_load.OtherProcesses, "cores", lambda _: 0.0)
    return made_up
