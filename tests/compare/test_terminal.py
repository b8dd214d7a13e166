"""Text in the terminal: printed as it is, without markup and control characters."""

import io
import subprocess
import sys

import pytest
from rich.table import Table

from compare.cli import main
from compare.commands.run import Run
from compare.execute.launch import EngineError
from compare.terminal import PlainConsole, coloured, printable


def test_command_line_imports_no_matplotlib():
    script = "import sys, compare.cli, compare.api; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def shown(thing: object, **options: object) -> str:
    file = io.StringIO()
    PlainConsole(file=file, width=200).print(thing, **options)
    return file.getvalue()


@pytest.mark.parametrize("text", ["[/x]", "runs/[link=x]", ":smile:", "\x1b[0m", "[[bold]"])
def test_text_has_no_markup(text):
    plain = printable(text)
    assert shown(plain) == shown(plain, style="bold red") == shown(coloured(text, "red")) == plain + "\n"
    table = Table(plain, title=plain, caption=plain)
    table.add_row(coloured(text, "red"))
    assert shown(table).count(plain) == 4


def test_control_characters_are_escaped():
    assert printable("a\x1b[2J\nb\udce9\x07, größer, 日本, π") == r"a\x1b[2J\nb\udce9\x07, größer, 日本, π"
    assert shown("first\nsecond \x1b[2J") == "first\nsecond \\x1b[2J\n"


def test_engine_error_has_no_markup(capsys, monkeypatch):
    def fail(*arguments, **keywords):
        raise EngineError("gloo: [/__w/pytorch] \x1b[31mpeer closed", exit_code=1)

    monkeypatch.setattr(Run, "__call__", fail)
    assert main(["run"]) == 1
    error = r"shardpair: error: gloo: [/__w/pytorch] \x1b[31mpeer closed"
    assert capsys.readouterr().err == error + "\n"
