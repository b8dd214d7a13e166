"""Text in the terminal: printed as it is, without markup and control characters."""

import io
import re
import subprocess
import sys

import pytest
from rich.table import Table as RichTable

from compare.cli import main
from compare.commands.run import Run
from compare.execute.launch import EngineError
from compare.show import terminal
from compare.show.findings import Row, Table, Text
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
    table = RichTable(plain, title=plain, caption=plain)
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


ENGINES = [f"{side}-{kind}" for side in ("jax", "torch") for kind in ("compiler", "manual", "explicit")]
BYTES = ["sent", "parameters", "gradients", "optimizer", "activations", "logits"]
NARROW = {
    "as it is": (["a", "b"], ["loss"], 40, ["a b", "loss 1.91 MB 1.91 MB"]),
    "headers at hyphens": (ENGINES, ["initial_weights"] * 7, 76, ["compiler manual explicit"]),
    "turned": (BYTES * 2, ["torch-manual"], 40, ["sent 1.91 MB", "logits 1.91 MB"]),
    "blocks": (
        BYTES,
        ["dp2+fsdp2+rows20+none"] * 8,
        60,
        ["layout sent parameters gradients", "layout optimizer"],
    ),
    "paragraphs": (BYTES, ["wide"] * 9, 20, ["wide; sent 1.91 MB;"]),
}


@pytest.mark.parametrize(("columns", "heads", "width", "shows"), NARROW.values(), ids=NARROW)
def test_narrow_table_cuts_no_word(monkeypatch, columns, heads, width, shows):
    file = io.StringIO()
    monkeypatch.setattr(terminal, "results_console", lambda: PlainConsole(file=file, width=width))
    rows = [Row(Text(head), [Text("1.91 MB")] * len(columns)) for head in heads]
    terminal.print_table(Table(name="", corner="layout", columns=columns, rows=rows))
    printed = file.getvalue()
    assert max(map(len, printed.splitlines())) <= width
    assert printed.count("1.91 MB") == len(columns) * len(heads)
    texts = " ".join((*columns, *heads, "layout"))
    for word in re.findall(r"[a-z][\w+-]*", printed):
        assert re.search(rf"(?<![A-Za-z]){re.escape(word)}(?:(?<=[-_+])|(?![\w+-]))", texts), word
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert all(any(line.startswith(words) or words in line for line in lines) for words in shows)


@pytest.mark.parametrize(
    ("text", "lines"),
    {
        "torch-manual": ["torch-", "manual"],
        "initial_weights at 1e-16": ["initial_", "weights", "at 1e-16"],
        "0.72 [0.70, 0.75]": ["0.72", "[0.70, 0.75]"],
        "1.91 MB in 3 s": ["1.91 MB", "in 3 s"],
    }.items(),
)
def test_lines_end_between_words(text, lines):
    assert terminal.broken(text, 8).split("\n") == lines
