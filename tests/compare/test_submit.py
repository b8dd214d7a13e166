"""`shardpair submit`: what is handed over to SLURM, and what is refused before."""

import importlib
from types import SimpleNamespace

import pytest

from compare.cli import main
from compare.commands import submit

LINE = ["submit", "--nodes", "2", "--partition", "fast", "--set", "account=mine", "--", "run", "check"]


class Executor:
    """submitit's, which submits nothing."""

    def __init__(self, **options):
        self.options = options

    def update_parameters(self, **parameters):
        self.parameters = parameters

    def submit(self, function):
        self.command = function
        return SimpleNamespace(job_id="7", paths=SimpleNamespace(stdout="out.log"))


@pytest.fixture
def executor(monkeypatch, tmp_path):
    """What a submission would use."""
    one = Executor()
    module = SimpleNamespace(
        AutoExecutor=lambda **options: one, helpers=SimpleNamespace(CommandFunction=lambda command: command)
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(submit.importlib, "import_module", lambda name: module)
    monkeypatch.chdir(tmp_path)
    return one


def test_a_job_runs_the_command_on_its_hosts(executor, capsys):
    assert main(LINE) == 0
    assert executor.command[1:] == ["-m", "compare", "run", "check", "--launcher", "slurm"]
    assert executor.parameters["nodes"] == 2
    assert executor.parameters["slurm_use_srun"] is False
    assert (executor.parameters["slurm_partition"], executor.parameters["slurm_account"]) == ("fast", "mine")
    assert "job 7: shardpair run check --launcher slurm" in capsys.readouterr().out


def test_collectives_are_a_job_too(executor):
    assert main(["submit", "--nodes", "2", "--", "collectives", "--ranks", "2"]) == 0
    assert executor.command[1:] == ["-m", "compare", "collectives", "--ranks", "2", "--launcher", "slurm"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["submit"], "give the command behind --"),
        (["submit", "--", "run", "check", "--layout.dp_replicat", "2"], "no such flag"),
        (["submit", "--", "runs"], "no such flag"),
        (["submit", "--nodes", "0", "--", "run"], "must be at least 1"),
        (["submit", "--set", "mine", "--", "run"], "give NAME=VALUE"),
    ],
)
def test_what_cannot_be_submitted_is_one_line(executor, capsys, line, words):
    assert main(line) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not hasattr(executor, "command")


def test_without_submitit_the_line_that_installs_it_is_said(monkeypatch, capsys):
    monkeypatch.setattr(submit.importlib.util, "find_spec", lambda name: None)
    assert main(LINE) == 3
    assert "pip install 'shardpair[submit]'" in " ".join(capsys.readouterr().err.split())
