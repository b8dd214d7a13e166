"""The load of the machine: `bench` refuses a busy one; times that were taken on one are marked."""

import subprocess
import sys

import pytest

from compare.cli import main
from compare.commands.bench.outcome import read_timings
from compare.execute import cpu_load
from compare.judge.outcome import read_outcome
from compare.system.facts import cores
from tests.support.made_up import ARGUMENTS, bench


def test_bench_refuses_busy_machine(engines, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cpu_load, "busy_cores", lambda: 1.5)
    assert bench() == 3
    assert "this machine is busy: other processes use 1.5 of its" in capsys.readouterr().err
    assert (engines.started, (tmp_path / "b").exists()) == ([], False)


@pytest.mark.parametrize(("machine", "idle", "busy"), [(2, 0.1, 0.3), (128, 5.0, 7.0)])
def test_busy_is_a_share_of_all_cores(machine, idle, busy):
    assert not cpu_load.is_busy(idle, of=machine)
    assert cpu_load.is_busy(busy, of=machine)


def test_cores_of_other_processes(monkeypatch):
    seconds = iter([(100.0, 50.0, 7.0), (110.0, 65.0, 11.0)])
    monkeypatch.setattr(cpu_load.OtherProcesses, "_seconds", staticmethod(lambda: next(seconds)))
    assert cpu_load.OtherProcesses().cores() == pytest.approx(1.1)


def test_ended_children_are_no_others():
    before = cpu_load.OtherProcesses._seconds()
    busy = "import time\nwhile time.process_time() < 0.4: pass"
    subprocess.run([sys.executable, "-c", busy], check=True)
    after = cpu_load.OtherProcesses._seconds()
    used, own = (now - then for now, then in zip(after[1:], before[1:], strict=True))
    assert own >= 0.3  # counted in hundredths
    assert used >= own - 0.1  # of the machine


def test_bench_anyway_marks_headline(engines, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cpu_load, "busy_cores", lambda: 1.5)
    loads = iter([0.1, 99.0, 0.1, 0.1])
    monkeypatch.setattr(cpu_load.OtherProcesses, "cores", lambda _: next(loads))
    assert bench("--rounds", "2", "--anyway") == 0
    result = read_timings(read_outcome(tmp_path / "b"))
    assert result.options["anyway"]
    assert sorted(result.circumstances.used_by_others.values()) == [0.1, 99.0]
    warning = f"Other processes used up to 99.0 of {cores()} cores while 1 of 2 cases ran"
    said, page = capsys.readouterr(), (tmp_path / "b" / "bench.html").read_text()
    assert warning in said.err
    assert warning in page
    assert "UNRELIABLE (busy machine): Wall time divided by" in said.out
    assert '<p class="verdict doubt">UNRELIABLE' in page


def test_run_on_a_busy_machine_warns(engines, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cpu_load.OtherProcesses, "cores", lambda _: 99.0)
    assert main(["run", "tiny.toml", *ARGUMENTS]) == 0
    warning = f"Other processes used up to 99.0 of {cores()} cores while 2 of 2 cases ran"
    said = capsys.readouterr()
    assert warning in said.err
    assert warning not in said.out  # pages of the documentation have the output of an idle machine
    assert warning in (tmp_path / "b" / "report.html").read_text()
