"""What the tests of the harness share."""

import json
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest
from markupsafe import Markup
from records import CORPUS, make_record, make_steps
from timed_engines import Engines
from warm import EMPTY_SVG

from compare import study, timing
from compare.cli import main
from compare.contract.record import Step
from compare.contract.request import REQUEST, Request
from compare.execute import load
from compare.host.json_files import write_json
from compare.spec.experiment import Experiment, edited, to_toml

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
def timed_engines(tmp_path, monkeypatch, tiny) -> Engines:
    """Made-up engines in the place of `launch`, on an idle machine, and tiny.toml in the working folder."""
    made_up = Engines()
    monkeypatch.setattr(timing, "launch", made_up)
    monkeypatch.setattr(load, "busy_cores", lambda: 0.0)
    monkeypatch.setattr(load.LoadBeside, "cores", lambda self: 0.0)
    monkeypatch.setattr(timing, "measure_ceiling", made_up.ceiling)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(to_toml(tiny))
    return made_up


class MadeUp:
    """Stands in for `launch`: leaves records by hand, or fails as it is told to, by the name of the case."""

    def __init__(self) -> None:
        self.failing: dict[str, BaseException] = {}
        self.steps: Callable[[Request], list[Step]] = lambda request: make_steps(request.experiment)
        self.started: list[str] = []

    def __call__(self, request, folder, *, pythons, hosts, on_step):
        self.started.append(folder.name)
        if error := self.failing.get(folder.name):
            folder.mkdir()
            raise error
        tensors = None if request.ladder else {}
        steps = self.steps(request)
        made = {"engine": request.engine, "tensors": tensors, "steps": steps}
        record = make_record(folder, request.experiment, **made)
        for step in record.steps:
            on_step(step)
        write_json(folder / REQUEST, request)
        return msgspec.structs.replace(record, request=request)


@pytest.fixture
def engines(tmp_path, monkeypatch, tiny) -> MadeUp:
    """Made-up engines of a study in the working folder, beside tiny.toml."""
    made_up = MadeUp()
    monkeypatch.setattr(study, "launch", made_up)
    monkeypatch.setattr(study, "prepare", lambda asked, at: (asked.data, CORPUS))
    monkeypatch.setattr(study, "open_corpus", lambda one: SimpleNamespace(sha256=CORPUS))
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
