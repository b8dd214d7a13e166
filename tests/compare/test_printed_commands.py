"""Every command line in README.md, docs/ and --help is valid, up to the first process.

Lines are collected from the pages and the commands' docstrings. A study runs with --dry_run. Other commands
run until they start a process. A command that reads a missing folder must be rejected because of the folder.
"""

import functools
import inspect
import itertools
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest

from compare.cli import COMMANDS, main
from compare.execute import cpu_load, launch
from compare.numerics import data
from compare.spec.experiment import load
from tests.support.checkpoints import write_random

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(?:sh|bash)\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`(shardpair [^`]+)`")
ASIDE = re.compile(r"\s{2,}\(.*")
"""A comment after a line of help."""
CONFIG = "n_layer = 6\ndataset = 'shakespeare_char'\n"


FOLDERS = ("--continue", "--results", "--resume")


class Started(BaseException):
    """A line started a process: it is valid."""


standard_library_text = functools.cache(data.standard_library_text)


def printed_lines() -> dict[str, list[str]]:
    """The words of every line that a page or a help prints, without what a shell makes of it, by the line."""
    pages = [page.read_text() for page in PAGES]
    fenced = [
        line
        for page in pages
        for block in FENCED.findall(page)
        for line in block.replace("\\\n", "").splitlines()
    ]
    inline = [" ".join(line.split()) for page in pages for line in INLINE.findall(page)]
    tried = [
        ASIDE.sub("", line.strip())
        for command in COMMANDS.values()
        for line in (inspect.getdoc(command) or "").partition("Try:")[2].splitlines()
    ]
    found = {}
    for line in (*fenced, *inline, *tried):
        words = shlex.split(line, comments=True)
        is_a_name = len(words) == 2 and line in inline  # the command is spoken of
        if (
            words[:1] == ["shardpair"]
            and not re.search(r"[&>]|--tyro|--help|EXPERIMENT|NAME", line)
            and not is_a_name
        ):
            found[" ".join(words)] = words[1:]
    return found


LINES = printed_lines()
TOKENS = {word for words in LINES.values() for word in words if word.startswith("data/")} | {
    "data/shakespeare_char"
}
"""Folders that lines, or the experiments that they name, read."""


@pytest.fixture
def places(tmp_path, line) -> Path:
    """A folder with what the line reads: texts, a TOML file, one of nanoGPT's config files; and tokens."""
    folder = tmp_path
    for name in ("docs", "runs"):
        (folder / name).mkdir()
    for name in TOKENS:
        write_tokens(folder / name)
    for word in LINES[line]:
        if word.endswith(".txt"):
            (folder / word).write_text("some words\n" * 2000)
        elif word.endswith(".toml"):
            (folder / word).write_text("")
        elif word.endswith(".py"):
            (folder / word).parent.mkdir(exist_ok=True)
            (folder / word).write_text(CONFIG)
    return folder


def write_tokens(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train.bin", "val.bin"):
        np.zeros(5000, "<u2").tofile(folder / name)


@pytest.fixture
def a_machine_with_everything(places, monkeypatch):
    """Eight GPUs, every package, nothing else running; and no process can start."""

    def start(*arguments, **keywords):
        raise Started

    monkeypatch.chdir(places)
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(launch, "visible_gpus", lambda: 8)
    monkeypatch.setattr(cpu_load, "busy_cores", lambda: 0.0)
    monkeypatch.setattr(data, "standard_library_text", standard_library_text)


@pytest.mark.usefixtures("a_machine_with_everything")
@pytest.mark.parametrize("line", LINES)
def test_printed_line(line, places, capsys, monkeypatch):
    command, *others = LINES[line]
    source = others[0] if command in ("resume", "convert", "sample", "report", "diff") else ""
    is_checkpoint = command not in ("report", "diff") and Path(source).suffix != ".pt" and source != "gpt2/"
    if source and is_checkpoint:
        write_random(places / source, load("demo"))
    can_dry_run = "dry_run" in COMMANDS[command].__struct_fields__
    is_planned = can_dry_run and not {"--continue", "--results"} & {*others}
    try:
        code = main([command, *others, *(["--dry_run"] if is_planned else [])])
    except Started:
        return
    said = " ".join(capsys.readouterr().err.split())
    behind = {after for flag, after in itertools.pairwise(others) if flag in FOLDERS} | {source}
    if "--launcher" in others:  # it runs inside an allocation alone
        assert (code, "begin with `salloc" in said or "no srun here" in said) == (2, True), said
        return
    missing = [word.rstrip("/") for word in behind if word and not (places / word).exists()]
    assert code == 0 or (code == 2 and any(word in said for word in missing)), said


def test_there_are_lines_of_every_command():
    assert {words[0] for words in LINES.values()} >= COMMANDS.keys() - {"doctor", "list"}
    assert len(LINES) > 40
