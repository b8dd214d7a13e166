"""What others use of the machine that a bench times on: refused, or on the record."""

import math
import subprocess
import sys
import time

import pytest

from compare.commands.bench import timed_study
from compare.commands.bench.outcome import timed
from compare.execute import load
from compare.execute.launchers import Hosts
from compare.judge.outcome import read_outcome
from tests.support.made_up import bench


def test_a_busy_machine_is_refused_before_anything_starts(timed_engines, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(load, "busy_cores", lambda: 1.5)
    assert bench() == 3
    assert "this machine is busy: other processes use 1.5 of its" in capsys.readouterr().err
    assert (timed_engines.started, (tmp_path / "b").exists()) == ([], False)


def test_busy_is_more_than_a_core_s_fifth_and_a_twentieth_of_all(monkeypatch):
    for cores, idle, busy in ((2, 0.1, 0.3), (128, 5.0, 7.0)):
        monkeypatch.setattr(load.psutil, "cpu_count", lambda cores=cores: cores)
        assert not load.is_busy(idle)
        assert load.is_busy(busy)


def test_a_busy_machine_is_on_the_record_if_it_is_wanted(timed_engines, tmp_path, monkeypatch, capsys):
    loads = iter([1.5, 1.5, 0.0, 1.0])
    monkeypatch.setattr(load, "busy_cores", lambda: next(loads))
    assert bench("--rounds", "3", "--anyway") == 0
    result = timed(read_outcome(tmp_path / "b"))
    assert (result.options["anyway"], result.circumstances.busy_cores) == (True, [1.5, 0.0, 1.0])
    said = "Others used the processor before round 1 (1.5 cores), round 3 (1.0 cores)"
    assert said in capsys.readouterr().out
    assert said in (tmp_path / "b" / "bench.html").read_text()


def test_what_others_use_beside_a_process_is_told(timed_engines, monkeypatch, tmp_path, capsys):
    loads = iter([0.0, 1.3])
    monkeypatch.setattr(load.LoadBeside, "cores", lambda self: next(loads))
    assert bench("--rounds", "1") == 0
    said = "Others used the processor beside torch-library.single in round 1 (1.3 cores): these figures may"
    assert said in capsys.readouterr().out
    found = timed(read_outcome(tmp_path / "b")).measurements
    assert [of[1].others_cores for of in found.values()] == [0.0, 1.3]


def test_what_a_launcher_started_is_not_called_others(timed_engines, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(load.LoadBeside, "cores", lambda self: 1.7)
    monkeypatch.setattr(timed_study, "hosts_of", lambda self: Hosts(launcher="slurm", count=1))
    assert bench("--rounds", "1") == 0
    said = capsys.readouterr().out
    assert "What else used the hosts' processors is not known" in said
    assert "Others used the processor" not in said
    found = timed(read_outcome(tmp_path / "b")).measurements
    assert [math.isnan(of[1].others_cores) for of in found.values()] == [True, True]


def test_own_processes_are_no_others(monkeypatch):
    """Beside a child that computes, a machine in which others use two cores all the time."""
    monkeypatch.setattr(load, "_all_s", lambda: load.cpu_seconds() + 2 * time.monotonic())
    beside, before = load.LoadBeside(), load.cpu_seconds()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    assert load.cpu_seconds() - before >= 0.5
    assert beside.cores() == pytest.approx(2.0, rel=1e-2)
