"""Questions to a side: the answer of its process, or one line of error for another program."""

import os
import sys
from pathlib import Path

import msgspec
import pytest

from compare.cli import main
from compare.commands import doctor
from compare.commands.doctor import SideReport, examine
from compare.execute import launch, query
from compare.execute.launch import with_safe_path
from compare.spec.engines.registry import SIDES
from compare.system.facts import has_ended
from tests.support import processes

MODULES = ("compare", "numpy", "jax", "torch", "msgspec", "jaxpar", "torchpar", "json")
REPORT = SideReport(versions={"jax": "1"}, cpu_devices="some", gpus=["[/x]"])


def test_side_imports_nothing_from_user_folder(tmp_path, monkeypatch):
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text(f"open('EXECUTED_{name}', 'w')\nraise SystemExit('hijacked')\n")
    monkeypatch.chdir(tmp_path)
    assert isinstance(examine("jaxpar", sys.executable), SideReport)
    for side in SIDES.values():
        assert launch.child_environment(side, "cpu")["PYTHONSAFEPATH"] == "1"
    environment = with_safe_path({**os.environ, "PYTHONPATH": "/first"})
    grandchild = "import json, sys; print(sys.path)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}], check=True)"
    done = processes.run([sys.executable, "-c", code], env=environment)
    assert "/first" in done.stdout, done.stderr
    assert not list(tmp_path.glob("EXECUTED_*"))


def program(folder: Path, script: str) -> str:
    """The path of a shell script."""
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 0", "printed nothing: give a Python in which jaxpar is installed"),
        ("echo '{\"versions\": 3}'", 'printed {"versions": 3}: give a Python'),
        ("echo '[/x] no such module' >&2; exit 1", "jaxpar: [/x] no such module"),
        ("exit 7", "ended with exit code 7"),
    ],
)
def test_other_program_is_rejected(script, message, tmp_path):
    assert message in str(examine("jaxpar", program(tmp_path, script)))


def test_missing_program_is_rejected():
    assert examine("jaxpar", "/nosuch") == "jaxpar: /nosuch: no such program"


def test_answer_before_a_warning_is_read(tmp_path):
    answer = f"cat <<'END'\n{msgspec.json.encode(REPORT).decode()}\nwarning: [/x]\nEND"
    assert examine("jaxpar", program(tmp_path, answer)) == REPORT


def test_doctor_prints_names_without_markup(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda side, python: REPORT if side == "jaxpar" else "[/y]")
    assert main(["doctor"]) == 3
    printed = capsys.readouterr().out
    assert "[/x]" in printed
    assert "[/y]" in printed
    assert printed.splitlines()[-1].startswith("3 of 6 engines can run here; GPUs: ")


def test_silent_program_ends_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(query, "TIMEOUT_S", 3)  # enough to start a shell on a busy machine
    python = program(tmp_path, "sleep 300 & echo $! > child; wait")
    monkeypatch.chdir(tmp_path)
    assert examine("jaxpar", python) == f"jaxpar: {python}: no answer for 3 s"
    child = int(Path("child").read_text())
    processes.wait_for(lambda: has_ended(child))


def test_side_ends_with_its_caller(tmp_path):
    python = program(tmp_path, f'echo "$@" > {tmp_path}/question; echo $$ > {tmp_path}/child; cat')
    script = "import sys; from compare.execute.query import query; "
    script += "query('jaxpar', sys.argv[1], ['-q'], answer=int)"
    caller = processes.start([sys.executable, "-c", script, python])
    processes.wait_for(lambda: (tmp_path / "child").is_file() and (tmp_path / "child").read_text())
    caller.kill()
    processes.wait_for(lambda: has_ended(int((tmp_path / "child").read_text())))
    assert (tmp_path / "question").read_text() == "-m jaxpar -q --exit-with-stdin\n"
