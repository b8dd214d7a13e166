"""A `numpy.py` in the user's folder: no side imports it, and what any program says is limited."""

import os
import sys
from pathlib import Path

import msgspec
import processes
import pytest

from compare.cli import main
from compare.commands import doctor
from compare.execute import ask, launch
from compare.execute.host_report import SideReport, examine
from compare.execute.launch import EngineError, with_safe_path
from compare.spec.engines.registry import SIDES

HOSTILE = ("compare", "numpy", "jax", "torch", "msgspec", "jaxpar", "torchpar", "json")
REPORT = SideReport(versions={"jax": "1"}, cpu_devices="some", gpus=["[/x]"])


@pytest.fixture
def hostile_folder(tmp_path, monkeypatch):
    """A folder full of modules with the names of ours and of our dependencies."""
    for name in HOSTILE:
        (tmp_path / f"{name}.py").write_text(f"open('EXECUTED_{name}', 'w')\nraise SystemExit('hijacked')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def executed(folder) -> list[str]:
    return sorted(path.name for path in folder.glob("EXECUTED_*"))


def test_the_doctor_asks_what_is_installed(hostile_folder):
    found = examine("jaxpar", sys.executable)
    assert isinstance(found, SideReport), found
    assert not executed(hostile_folder)


@pytest.mark.parametrize("side", ["jaxpar", "torchpar"])
def test_engines_start_with_that_path(side):
    assert launch.child_environment(SIDES[side], "cpu")["PYTHONSAFEPATH"] == "1"


def test_what_a_side_starts_is_safe_too_and_pythonpath_is_honoured(hostile_folder):
    ours = str(Path(launch.__file__).parents[2])
    environment = with_safe_path({**os.environ, "PYTHONPATH": "/first"})
    assert environment["PYTHONPATH"].split(os.pathsep) == ["/first", ours]
    grandchild = "import json, sys; print(sys.path)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}], check=True)"
    done = processes.run([sys.executable, "-c", code], env=environment)
    assert "/first" in done.stdout, done.stderr
    assert not executed(hostile_folder)


def program(folder, script: str) -> str:
    """A program that is no Python of ours."""
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("exit 0", "is no Python that has jaxpar: it says nothing"),
        ("echo hello", "is no Python that has jaxpar: it says hello"),
        ("echo '{\"versions\": 3}'", "is no Python that has jaxpar: it says {"),
        ("printf '\\377\\376'", "is no Python that has jaxpar: it says \ufffd\ufffd"),
        ("echo '[/x] no such module' >&2; exit 1", "jaxpar: [/x] no such module"),
        ("exit 7", "ended with exit code 7"),
        ("yes", "jaxpar: y "),
        ("echo " + "x" * 1000, "x" * 300 + " ..."),
    ],
    ids=["silence", "words", "json", "bytes", "errors", "code", "endless", "long"],
)
def test_any_program_may_be_taken_for_a_python(tmp_path, monkeypatch, capsys, script, says):
    monkeypatch.setattr(ask, "OUTPUT_BYTES", 10_000)
    python = program(tmp_path, script)
    monkeypatch.setattr(
        doctor, "examine", lambda side, python: REPORT if side == "torchpar" else examine(side, python)
    )
    assert main(["doctor", "--jax_python", python]) == 3
    printed = "".join(capsys.readouterr().out.split("\n"))
    assert says in printed
    assert "[/x]" in printed  # of a GPU's name: no markup


def test_a_warning_after_the_answer_does_not_hide_it(tmp_path):
    python = program(tmp_path, f"cat <<'END'\n{msgspec.json.encode(REPORT).decode()}\nwarning: [/x]\nEND")
    assert examine("jaxpar", python) == REPORT


def test_a_program_that_never_answers_is_ended_with_what_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(ask, "TIMEOUT_S", 3)  # enough to start a shell, however busy the machine
    python = program(tmp_path, "sleep 300 & echo $! > child; wait")
    monkeypatch.chdir(tmp_path)
    assert examine("jaxpar", python) == f"jaxpar: {python}: no answer for 3 s"
    child = int(Path("child").read_text())
    processes.wait_for(lambda: processes.has_ended(child))  # a kill takes its time


def test_no_such_python():
    assert examine("jaxpar", "/nosuch") == "jaxpar: /nosuch: no such program"


def test_engine_errors_are_no_markup(capsys, monkeypatch):
    def fail(*arguments, **keywords):
        raise EngineError("gloo: [/__w/pytorch] \x1b[31mpeer closed", exit_code=1)

    monkeypatch.setattr("compare.cli._dispatch", fail)
    assert main(["run"]) == 1
    error = r"shardpair: error: gloo: [/__w/pytorch] \x1b[31mpeer closed"
    assert capsys.readouterr().err == error + "\n"
