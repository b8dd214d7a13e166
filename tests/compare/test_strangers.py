"""What a stranger left: a run's folder, modules where the user works, any program for a Python, odd names.

It is read and shown, and nothing of it is executed, followed or obeyed.
"""

import io
import os
import subprocess
import sys
from pathlib import Path

import msgspec
from rich.table import Table

from compare.cli import main
from compare.commands import doctor
from compare.commands.doctor import SideReport, examine
from compare.execute import launch, query
from compare.execute.launch import EngineError, with_safe_path
from compare.spec.engines.registry import SIDES
from compare.system.facts import has_ended
from compare.terminal import PlainConsole, coloured, printable
from tests.support import processes

MODULES = ("compare", "numpy", "jax", "torch", "msgspec", "jaxpar", "torchpar", "json")
REPORT = SideReport(versions={"jax": "1"}, cpu_devices="some", gpus=["[/x]"])


def test_the_command_line_loads_no_matplotlib():
    script = "import sys, compare.cli, compare.api; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_no_side_imports_what_lies_where_the_user_works(tmp_path, monkeypatch):
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
    """A program that is no Python of ours."""
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_any_program_may_be_taken_for_a_python(tmp_path, monkeypatch, capsys):
    for script, says in {
        "exit 0": "printed nothing: give a Python in which jaxpar is installed",
        "echo '{\"versions\": 3}'": 'printed {"versions": 3}: give a Python',
        "echo '[/x] no such module' >&2; exit 1": "jaxpar: [/x] no such module",
        "exit 7": "ended with exit code 7",
    }.items():
        assert says in str(examine("jaxpar", program(tmp_path, script)))
    assert examine("jaxpar", "/nosuch") == "jaxpar: /nosuch: no such program"
    answer = f"cat <<'END'\n{msgspec.json.encode(REPORT).decode()}\nwarning: [/x]\nEND"
    python = program(tmp_path, answer)
    assert examine("jaxpar", python) == REPORT
    monkeypatch.setattr(doctor, "examine", lambda side, python: REPORT if side == "jaxpar" else "[/y]")
    assert main(["doctor"]) == 3
    printed = capsys.readouterr().out
    assert "[/x]" in printed  # of a GPU's name: no markup
    assert "[/y]" in printed


def test_a_program_that_never_answers_is_ended_with_what_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(query, "TIMEOUT_S", 3)  # enough to start a shell, however busy the machine
    python = program(tmp_path, "sleep 300 & echo $! > child; wait")
    monkeypatch.chdir(tmp_path)
    assert examine("jaxpar", python) == f"jaxpar: {python}: no answer for 3 s"
    child = int(Path("child").read_text())
    processes.wait_for(lambda: has_ended(child))  # a kill takes its time


def test_who_is_asked_ends_with_who_asked(tmp_path):
    python = program(tmp_path, f'echo "$@" > {tmp_path}/asked; echo $$ > {tmp_path}/child; cat')
    ask_it = "import sys; from compare.execute.query import query; "
    ask_it += "query('jaxpar', sys.argv[1], ['-q'], answer=int)"
    asking = processes.start([sys.executable, "-c", ask_it, python])
    processes.wait_for(lambda: (tmp_path / "child").is_file() and (tmp_path / "child").read_text())
    asking.kill()
    processes.wait_for(lambda: has_ended(int((tmp_path / "child").read_text())))
    assert (tmp_path / "asked").read_text() == "-m jaxpar -q --exit-with-stdin\n"


def test_text_is_shown_as_it_is_and_a_terminal_obeys_nothing():
    def shown(thing: object, **options: object) -> str:
        file = io.StringIO()
        PlainConsole(file=file, width=200).print(thing, **options)
        return file.getvalue()

    for text in ("[/x]", "runs/[link=x]", ":smile:", "[0m", "[[bold]"):
        assert shown(text) == shown(text, style="bold red") == shown(coloured(text, "red")) == text + "\n"
        table = Table(text, title=text, caption=text)
        table.add_row(coloured(text, "red"))
        assert shown(table).count(text) == 4
    assert printable("a\x1b[2J\nb\udce9\x07, größer, 日本, π") == r"a\x1b[2J\nb\udce9\x07, größer, 日本, π"
    assert shown("first\nsecond \x1b[2J") == "first\nsecond \\x1b[2J\n"


def test_an_error_of_an_engine_is_no_markup(capsys, monkeypatch):
    """A message of gloo's once ended in a traceback after the training."""

    def fail(*arguments, **keywords):
        raise EngineError("gloo: [/__w/pytorch] \x1b[31mpeer closed", exit_code=1)

    monkeypatch.setattr("compare.cli._dispatch", fail)
    assert main(["run"]) == 1
    error = r"shardpair: error: gloo: [/__w/pytorch] \x1b[31mpeer closed"
    assert capsys.readouterr().err == error + "\n"
