"""Printing text as it is: nothing from outside is taken for markup, or obeyed by a terminal."""

import io
from pathlib import Path

from records import finished_of
from rich.style import Style
from rich.table import Table
from rich.text import Text

from compare.execute.launch import EngineError
from compare.execute.progress import Reporter
from compare.judge.ladder import RungResult, Verdict
from compare.show.page import leave_page
from compare.show.terminal import print_findings
from compare.spec.experiment import Experiment
from compare.studies.check import Check
from compare.terminal import PIPE_WIDTH, PlainConsole, coloured, printable, results_console

HOSTILE = ["[/x]", "[/__w/pytorch/gloo]", "[red]", "runs/[link=x]", ":smile:", "[0m", "[[bold]"]


def shown(thing: object, **options: object) -> str:
    file = io.StringIO()
    PlainConsole(file=file, width=200).print(thing, **options)
    return file.getvalue()


def test_text_is_shown_as_it_is_wherever_it_stands():
    for text in HOSTILE:
        assert shown(text) == text + "\n"
        assert shown(text, style="bold red") == text + "\n"
        assert shown(coloured(text, "red")) == text + "\n"
        table = Table(title=text, caption=text)
        table.add_column(text, footer=text)
        table.add_row(text)
        table.add_row(coloured(text, "red"))
        assert shown(table).count(text) == 5


def test_colour_is_there_in_a_terminal():
    assert coloured("ok", "green").style == "green"
    file = io.StringIO()
    PlainConsole(file=file, force_terminal=True, color_system="standard").print(coloured("[/x]", "red"))
    assert file.getvalue() == Style.parse("red").render("[/x]", color_system=None).join(
        ["\x1b[31m", "\x1b[0m\n"]
    )


def test_a_terminal_obeys_nothing_from_outside():
    assert printable("a\x1b[2J\nb\udce9\x07") == r"a\x1b[2J\nb\udce9\x07"
    assert printable("größer, 日本, π") == "größer, 日本, π"
    assert shown("first\nsecond \x1b[2J") == "first\nsecond \\x1b[2J\n"
    table = Table("column")
    table.add_row("\x1b]0;title\x07")
    assert r"\x1b]0;title\x07" in shown(table)


def verdict(candidate: str) -> Verdict:
    bad = RungResult(rung="loss", error=1.0, tolerance=0.1, worst="[/step 0]", reason="[/why]")
    return Verdict(candidate=candidate, reference="[/reference]", rungs=[bad])


def test_outcome_with_hostile_names(capsys):
    """`run --run_dir 'runs/[/x]'` and a message of gloo's once ended in a traceback after the training."""
    comparison = finished_of(
        Experiment(),
        {"[/reference]": {}, "[/case]": {}},
        name="[/name]",
        verdicts=[verdict("[/case]")],
        failures={"[/other]": "gloo: [/__w/pytorch/gloo/transport] reset"},
    )
    print_findings(Check.findings(comparison, Path()), as_json=False)
    leave_page(lambda: Path("runs/[/x]/report.html"), as_json=False)
    printed = capsys.readouterr().out
    for text in ("[/case]", "[/__w/pytorch/gloo/transport]", "report: runs/[/x]/report.html"):
        assert text in printed


def test_progress_with_hostile_names(tmp_path, capsys):
    log = tmp_path / "[" / "log]"
    log.parent.mkdir()
    log.write_text("[/tail]\n")
    Reporter().failed(EngineError("engine: [/__w/gloo]", exit_code=1, log=log))
    printed = capsys.readouterr().err
    assert all(text in printed for text in ("[/tail]", f"{log}", "[/__w/gloo]"))


def test_a_table_in_a_pipe_is_not_cut(capsys):
    results_console().print(Text("x" * (PIPE_WIDTH - 1)))
    assert capsys.readouterr().out == "x" * (PIPE_WIDTH - 1) + "\n"
