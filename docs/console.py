"""Console blocks of the documentation: run their commands, and write or compare the output.

A block starts with ```console. A line `$ shardpair ...` is a command. The lines after it are its stdout.
The commands of a page run in one folder, in order.
`python docs/console.py` writes the outputs of all pages again.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^\$ (.*)\n", re.MULTILINE)
TIMED = re.compile(r"\b(time|ms|s|tokens/s|GFLOP/s|CPU|compilation|first step|busy|load)\b|\u00d7")
"""Words of lines whose numbers differ from run to run."""

BUSY = "Other processes used "
"""Start of a warning that a page does not show: the machine was busy."""


def pages() -> list[Path]:
    """Pages that contain console blocks."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in found if BLOCK.search(page.read_text())]


def commands(page: str) -> Iterator[tuple[str, str]]:
    """(command, output) for each command of a page, in order."""
    for block in BLOCK.findall(page):
        _, *parts = COMMAND.split(block)
        yield from zip(parts[::2], parts[1::2], strict=True)


def rewritten(page: str, outputs: Iterator[str]) -> str:
    """The page with new outputs, one for each of `commands(page)`."""

    def block(match: re.Match[str]) -> str:
        found = [command for command in COMMAND.findall(match[0])]
        return "".join(f"$ {command}\n{next(outputs)}" for command in found)

    return BLOCK.sub(block, page)


def comparable(output: str) -> list[str]:
    """Lines of an output without layout, numbers that differ from run to run, and warnings of load."""
    lines = []
    for line in output.splitlines():
        line = re.sub(r"\d{8}-\d{6}", "TIME", re.sub(r"\d+(\.\d+)?e-\d+", "ERROR", line))
        line = re.sub(r"\d[\d,.]*", "N", line) if TIMED.search(line) else line
        lines.append(" ".join(re.sub(r"[─━]+", "", line).split()))
    return [line for line in lines if line and not line.startswith(BUSY)]


def outputs(page: str, folder: Path, python: str = sys.executable) -> Iterator[str]:
    """Stdout of each command of a page, run by `python` in a folder at 120 columns."""
    program = folder / "bin" / "shardpair"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(python)} -m compare "$@"\n')
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent), os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "COLUMNS": "120", "PATH": path}
    for command, _ in commands(page):
        done = subprocess.run(command, shell=True, cwd=folder, env=environment, stdout=PIPE, text=True)
        lines = [line.rstrip() for line in done.stdout.strip("\n").splitlines()]
        yield "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    for path in pages():
        with tempfile.TemporaryDirectory() as folder:
            text = path.read_text()
            path.write_text(rewritten(text, outputs(text, Path(folder))))
