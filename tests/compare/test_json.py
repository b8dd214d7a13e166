"""`--json`: every command prints one form, which docs/records.md describes."""

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from compare.cli import COMMANDS, main
from compare.commands import collectives, doctor, sample
from compare.commands.ledger import chips
from compare.judge.outcome import Case
from compare.judge.verdict import RungResult, Verdict
from compare.setup.presets import spread
from compare.show.envelope import VERSION, CaseState, Envelope, states_of
from compare.spec.experiment import load
from tests.compare.test_collectives import times_of
from tests.compare.test_ledger_chips import FLAGS, PROGRAM
from tests.compare.test_query import REPORT
from tests.support.checkpoints import write_random
from tests.support.records import make_request, make_run, outcome_of

PAGE = (Path(__file__).parents[2] / "docs" / "records.md").read_text()


def rows_of_page(*heads: str) -> list[list[list[str]]]:
    """The names in backquotes in each cell of the page's table with these headers."""
    head = f"| {' | '.join(heads)} |\n"
    (table,) = re.findall(rf"{re.escape(head)}\|[-|]+\|\n((?:\|.*\n)+)", PAGE)
    return [
        [re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split("|")] for line in table.splitlines()
    ]


FIELDS = [name for names, _ in rows_of_page("field", "content") for name in names]
VALUES = {
    command: values
    for commands, values in rows_of_page("command", "keys of `values`")
    for command in commands
}
"""Keys of `values` by command."""


def told(capsys: pytest.CaptureFixture[str], *arguments: str, of: str = "", codes: tuple = (0,)) -> Any:
    """The object of a command, which has the documented fields; `of` is its row in the table of values."""
    capsys.readouterr()
    code = main([*arguments, "--json"])
    assert code in codes
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    found = msgspec.json.decode(printed, type=Envelope)
    shown = json.loads(printed)
    assert list(shown) == FIELDS
    study = {"report": of, "resume": "run"}.get(arguments[0], arguments[0])
    assert (found.version, found.study) == (VERSION, study)
    assert found.passed is (code == 0)
    assert found.verdict
    assert list(found.values) == VALUES[of or arguments[0]]
    for table in found.tables:
        assert {len(row) for row in table.rows} <= {len(table.columns)}
    return found


def test_page_lists_the_fields_and_commands():
    assert list(Envelope.__struct_fields__) == FIELDS
    assert VALUES.keys() == COMMANDS.keys() - {"report"} | {"ledger --chip", "--dry_run"}
    states = [name for names, _ in rows_of_page("state", "meaning") for name in names]
    hints = msgspec.structs.fields(CaseState)
    (allowed,) = (field.type.__args__ for field in hints if field.name == "state")
    assert states == list(allowed)


PAIR = ("--engines", "torch-manual", "jax-manual")
ASKED = {
    "run": PAIR,
    "check": (*PAIR, "--presets", "fsdp", "--devices", "2"),
    "sweep": (*PAIR, "--presets", "fsdp"),
    "memory": (*PAIR, "--presets", "single"),
    "ledger": PAIR,
    "bench": (*PAIR, "--rounds", "1"),
    "profile": (*PAIR, "--train.max_iters", "8"),  # the engines leave no timeline
    "faults": ("--engines", "torch-manual", "--names", "no_clip"),
}


CAUGHT = "no_clip.torch-manual"
"""The case of a mistake: it passes because it fails at its rung."""


@pytest.mark.parametrize("word", ASKED)
def test_study(engines, capsys, word):
    asked = (word, "tiny.toml", *ASKED[word], "--quiet", "--run_dir", "r")
    planned = told(capsys, *asked, "--dry_run", of="--dry_run")
    assert (planned.passed, planned.dry_run, planned.folder) == (True, True, "")
    assert {case.state for case in planned.cases.values()} == {"planned"}
    assert engines.started == []
    found = told(capsys, *asked, codes=(0, 1))
    assert (found.dry_run, found.folder) == (False, "r")
    assert found.page == "" if word == "ledger" else Path(found.page).is_file()
    assert found.passed is (word != "profile")
    assert found.cases.keys() == planned.cases.keys()
    for name, case in found.cases.items():
        assert case.state == ("passed" if case.rungs else "not compared"), case
        assert case.against in ("", *found.cases)
        if case.rungs:
            assert case.verdict.startswith("FAIL at first_weights" if name == CAUGHT else "PASS")
        assert case.figures == found.values["outcome"]["kept"][name]["1"]
    again = told(capsys, "report", "r", of=word, codes=(0, 1))
    assert again == msgspec.structs.replace(found, page=again.page)


ERRORS = {"loss": 1e-7, "gradients": math.inf}


def test_case_has_its_state(tiny):
    """NaN, an infinite error and a missing case do not pass. JSON has null for infinity."""
    rungs = [RungResult(rung=name, error=error, tolerance=1e-6, worst="x") for name, error in ERRORS.items()]
    names = ("reference", "near", "far", "lost")
    case = Case(request=make_request(tiny), against="reference")
    outcome = outcome_of(
        tiny,
        cases={
            name: msgspec.structs.replace(case, against="") if name == names[0] else case for name in names
        },
        kept={name: {1: {"final_loss": math.nan}} for name in names[:3]},
        verdicts=[
            Verdict(candidate="near", reference="reference", rungs=rungs[:1]),
            Verdict(candidate="far", reference="reference", rungs=rungs),
        ],
        failures={"lost": "no luck"},
    )
    states = states_of(outcome)
    assert [state.state for state in states.values()] == ["not compared", "passed", "failed", "missing"]
    assert states["lost"].verdict == "did not finish: no luck"
    assert states["far"].verdict == "FAIL at gradients: x"
    shown = json.loads(msgspec.json.encode(states["far"]))
    assert shown["rungs"] == {
        "loss": {"passed": True, "error": 1e-7, "tolerance": 1e-6, "worst": "x"},
        "gradients": {"passed": False, "error": None, "tolerance": 1e-6, "worst": "x"},
    }
    assert shown["figures"] == {"final_loss": None}


def test_diff_and_lesson(tmp_path, capsys):
    experiment = spread(load("check"), "fsdp", 2)
    make_run(tmp_path / "a", experiment, names=("jax-manual", "torch-manual"))
    make_run(tmp_path / "b", experiment, names=("jax-manual",))
    found = told(capsys, "diff", str(tmp_path / "a"), str(tmp_path / "b"))
    assert {name: case.state for name, case in found.cases.items()} == {"jax-manual": "passed"}
    assert list(found.left_out) == [str(tmp_path / "a" / "torch-manual")]
    found = told(capsys, "lesson", "fully_sharded", "--results", str(tmp_path / "a"))
    assert (found.folder, found.page) == (str(tmp_path / "a"), str(tmp_path / "a" / "lesson.html"))
    assert found.passed


def test_resume(tmp_path, tiny, capsys):
    given = str(write_random(tmp_path / "given", tiny))
    asked = ("resume", given, "--engines", "torch-manual", "--train.max_iters", "9", "--dry_run")
    assert list(told(capsys, *asked, of="--dry_run").cases) == ["torch-manual"]


def test_commands_that_are_no_studies(tmp_path, tiny, monkeypatch, capsys):
    told(capsys, "list")
    told(capsys, "plan", "check", "--devices", "2")
    given = str(write_random(tmp_path / "given", tiny))
    told(capsys, "convert", given, str(tmp_path / "w.safetensors"))
    drawn = iter(([[65, 66]], [[65, 67]]))
    monkeypatch.setattr(sample, "query", lambda *_, **__: next(drawn))
    found = told(capsys, "sample", given, "--sides", "jaxpar", "torchpar", codes=(1,))
    assert (found.passed, found.verdict) == (False, "torchpar drew something else than jaxpar")
    monkeypatch.setattr(doctor, "examine", lambda side, python: REPORT if side == "jaxpar" else "it is lost")
    found = told(capsys, "doctor", codes=(3,))
    assert (found.passed, found.values["sides"]["torchpar"]) == (False, {"error": "it is lost"})
    monkeypatch.setattr(chips, "query", lambda *_, **__: PROGRAM)
    chip = (*FLAGS, "--chip", "cpu", "--engines", "jax-manual")
    assert told(capsys, *chip, of="ledger --chip").passed
    found = told(capsys, *chip, "--dry_run", of="ledger --chip")
    assert (found.dry_run, found.values["programs"]) == (True, [])


def test_collectives(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(collectives.cpu_load, "busy_cores", lambda: 0.0)
    monkeypatch.setattr(collectives, "require_sides", lambda sides, pythons: None)
    monkeypatch.setattr(collectives, "time_collectives", lambda *_, **__: times_of())
    asked = ("collectives", "--ranks", "2", "--quiet", "--run_dir", str(tmp_path / "r"))
    found = told(capsys, *asked)
    assert (found.passed, found.folder) == (True, str(tmp_path / "r"))
