"""The load of the machine that a bench times on: a busy one is refused, or stands in the record."""

import pytest

from compare.commands.bench.outcome import read_timings
from compare.execute import cpu_load
from compare.judge.outcome import read_outcome
from tests.support.made_up import bench


def test_bench_refuses_busy_machine(engines, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cpu_load, "busy_cores", lambda: 1.5)
    assert bench() == 3
    assert "this machine is busy: other processes use 1.5 of its" in capsys.readouterr().err
    assert (engines.started, (tmp_path / "b").exists()) == ([], False)


@pytest.mark.parametrize(("cores", "idle", "busy"), [(2, 0.1, 0.3), (128, 5.0, 7.0)])
def test_busy_is_a_share_of_all_cores(monkeypatch, cores, idle, busy):
    monkeypatch.setattr(cpu_load.psutil, "cpu_count", lambda: cores)
    assert not cpu_load.is_busy(idle)
    assert cpu_load.is_busy(busy)


def test_bench_anyway_records_load(engines, tmp_path, monkeypatch, capsys):
    loads = iter([1.5, 0.0])
    monkeypatch.setattr(cpu_load, "busy_cores", lambda: next(loads))
    assert bench("--rounds", "3", "--anyway") == 0
    result = read_timings(read_outcome(tmp_path / "b"))
    assert (result.options["anyway"], result.circumstances.busy_cores) == (True, [1.5, 0.0])
    warning = "Other processes used 1.5, 0.0 cores before and after the rounds"
    assert warning in capsys.readouterr().out
    assert warning in (tmp_path / "b" / "bench.html").read_text()
