"""Every command line in README.md, docs/, --help and messages is valid, up to the first process.

Lines are collected from the pages, the commands' docstrings, and the texts of the source. A study runs with
--dry_run. Other commands run until they start a process. A command that reads a missing folder must be
rejected because of the folder.
"""

import ast
import functools
import inspect
import itertools
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from compare.cli import COMMANDS, main
from compare.commands.registry import STUDIES
from compare.execute import cpu_load, launch
from compare.execute.launch import EngineError
from compare.numerics import data
from compare.parser import fields_of
from compare.run import study
from compare.setup.lessons import LESSONS, run_command
from compare.side.ending import STOPPED
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


RUN = "runs/demo-20260101-120000"
LESSON = "shardpair run {lesson.experiment} --preset {lesson.preset} --devices {lesson.devices}"
ADVICE = {
    "shardpair run {first}": [f"shardpair run {name}" for name in ("demo", "check")],
    "shardpair run --preset {first}": ["shardpair run --preset fsdp"],
    "shardpair run --keep_tensors": ["shardpair run --keep_tensors"],
    "shardpair lesson {strategy}": [f"shardpair lesson {name}" for name in LESSONS],
    "shardpair lesson {name} --results {of}": [f"shardpair lesson fully_sharded --results {RUN}"],
    "shardpair ledger --results {of} --rows": [f"shardpair ledger --results {RUN} --rows"],
    "shardpair ledger {name} --chip": [],  # test_plan.py runs it
    "shardpair {self.study} --continue {shlex.quote(str(folder))}": [
        f"shardpair {word} --continue {RUN}" for word in STUDIES if word != "resume"
    ],
    "shardpair {study} --continue": [],  # test_dry_run.py compares the script that it is a line of
    LESSON: [run_command(name) for name in LESSONS],
    "shardpair {word} --help": [],  # test_presets_and_flags.py prints the help of every command
    "shardpair {word} {metavar}": [],  # {metavar} is a place
}
"""Commands in texts of the source, with placeholders, and command lines without."""
NO_COMMAND = {
    "shardpair {importlib.metadata.version('shardpair')}",
    "shardpair {self.git_commit[:12]}",
    "shardpair {figure.title}",
    "shardpair {len(self.spans)}",
}
ADVISED = re.compile(r"shardpair (?:[a-z_]+|\{[^}]*\})(?: (?:--?[\w.=]+|\{[^}]*\}|[A-Z_]+\b))*")
ADVISED_FLAG = re.compile(r"(?<![\w-])--([a-z][\w.-]*)")
FOREIGN = {
    *("cpu-bind", "distribution", "exit-with-stdin", "gpu-bind", "kill-on-bad-exit", "label", "mpi", "nodes"),
    *("ntasks", "ntasks-per-node", "overcommit", "unbuffered", "container-image"),  # srun
    *("job-name", "time", "signal", "requeue", "open-mode", "output", "gpus-per-node"),  # sbatch
    *("master-addr", "master-port", "nnodes", "node-rank", "nproc-per-node"),  # torchrun
    *("porcelain", "untracked-files", "format", "full-name", "query-gpu"),  # git, nvidia-smi, shells
    *("ranks-platform", "ranks-timeout"),  # pytest, with torchpar.plugin
    *("base", "doctor", "collectives", "compile", "convert", "sample"),  # questions to a side
    *("help", "version", "tyro-", "xla_gpu_cuda_data_dir"),
}
"""Flags of other programs, and of no command."""


def texts_of(path: Path) -> Iterator[str]:
    """Texts of a source file other than docstrings; the code of an f-string's values is in braces."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    parts |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value
        elif isinstance(node, ast.JoinedStr) and id(node) not in parts:
            yield "".join(
                part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
                for part in node.values
            )


TEXTS = {
    path.relative_to(ROOT): list(texts_of(path))
    for side in ("compare", "jaxpar", "torchpar")
    for path in sorted((ROOT / side).rglob("*.py"))
}
"""Texts of each source file."""


def test_every_advised_command_is_tested():
    found = {line for texts in TEXTS.values() for text in texts for line in ADVISED.findall(text)}
    is_name = {line for line in found if re.fullmatch(r"shardpair (\w+|\{(word|saved.study)\})", line)}
    assert found - is_name - NO_COMMAND == ADVICE.keys()
    names = {line.split()[1] for line in is_name if "{" not in line}
    prose = {"is", "in", "does", "step", "wait"}
    assert names - prose <= COMMANDS.keys()


@pytest.mark.parametrize("path", [path for path, texts in TEXTS.items() if "--" in "".join(texts)], ids=str)
def test_advised_flags_exist(path):
    """A flag in a text of a command's own file is a flag of this command, or of one that the text names."""
    own = re.match(r"compare/commands/(\w+)", path.as_posix())
    words = {own[1]} & COMMANDS.keys() if own else COMMANDS.keys()
    for text in TEXTS[path]:
        named = {*re.findall(r"shardpair (\w+)", text)} & COMMANDS.keys()
        known = {flag for word in words | named or COMMANDS for flag in fields_of(COMMANDS[word])}
        for flag in ADVISED_FLAG.findall(text):
            name = flag.rstrip(".").removeprefix("no_")
            name = name if name in FOREIGN else name.replace("-", "_")  # both are read
            assert name in known | FOREIGN or any(of.startswith(f"{name}.") for of in known), (flag, text)


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
    for line in (*fenced, *inline, *tried, *itertools.chain(*ADVICE.values())):
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
    """Eight GPUs, a large disk, every package, nothing else running; and no process can start."""

    def start(*arguments, **keywords):
        raise Started

    monkeypatch.chdir(places)
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(launch, "visible_gpus", lambda: 8)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1e15))
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
    printed = capsys.readouterr()
    said = " ".join(printed.err.split())
    behind = {after for flag, after in itertools.pairwise(others) if flag in FOLDERS} | {source}
    if "--launcher" in others and is_planned:  # the data of GPT-2 is not here
        assert code == 0 or "refused: data.source: data/openwebtext does not exist" in printed.out
        return
    if "--launcher" in others:
        assert (code, "begin with `salloc" in said or "no srun here" in said) == (2, True), said
        return
    missing = [word.rstrip("/") for word in behind if word and not (places / word).exists()]
    assert code == 0 or (code == 2 and any(word in said for word in missing)), said


def test_there_are_lines_of_every_command():
    assert {words[0] for words in LINES.values()} >= COMMANDS.keys() - {"doctor", "list"}
    assert len(LINES) > 40


def test_printed_order_of_arguments_is_accepted(folder_of_tiny, capsys):
    assert main(["run", "--preset", "fsdp", "--devices", "2", "tiny.toml", "--engines", "jax-manual"]) == 2
    _, _, line = capsys.readouterr().err.partition("give the experiment first: ")
    assert main([*shlex.split(line)[1:], "--dry_run"]) == 0


@pytest.mark.parametrize("saves", ["all", "last"])
@pytest.mark.parametrize("command", ["run", "sweep"])
def test_printed_continuation_is_accepted(engines, capsys, command, saves):
    """After SIGUSR1 to an engine, in a folder whose name has a space."""

    def stopped(request, folder, **how):
        record = engines(request, folder, **how)
        if saves == "all" or len(engines.started) == 3:
            write_random(folder, request.experiment)
        if len(engines.started) == 3:
            raise EngineError("stopped", exit_code=STOPPED)
        return record

    names = ["torch-manual", "jax-manual", "torch-library"][: 3 if command == "run" else 2]
    asked = [command, "tiny.toml", "--engines", *names, "--run_dir", "my run", "--quiet"]
    asked += ["--presets", "ddp"] if command == "sweep" else []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(study, "launch", stopped)
        assert main([*asked, "--checkpoint.every", "7", "--train.max_iters", "9"]) == STOPPED
    (line,) = re.findall(r"`([^`]+)` goes on", capsys.readouterr().err)
    words = shlex.split(line)
    assert main([*words[1:], "--quiet"]) in (0, 1)  # the made-up checkpoints are of another step
    assert len(engines.started) > 3
