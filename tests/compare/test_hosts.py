"""Engines on several hosts: what starts them, and a run on two that are this machine."""

import shlex
import sys
from pathlib import Path

import processes
import pytest

from compare.contract.ledger import SCALAR
from compare.contract.record import read_failure, read_record
from compare.execute import hostfile
from compare.execute import hosts as several
from compare.execute.hosts import HERE, Hosts, find_hosts, start_together, without_place
from compare.judge.strategy import strategy_of
from compare.spec.engines.registry import side_of
from compare.spec.experiment import ExperimentError, Layout

JAX, TORCH = side_of("jax-manual"), side_of("torch-manual")
FOUR = Layout(dp_replicate=2, tp=2)
RUN = ["python", "-m"]
DIR = Path("/runs/mine")
END = ["/runs/mine", "--exit-with-stdin"]


def test_one_host_is_the_engine_itself():
    assert HERE.command("python", JAX, DIR, layout=FOUR) == [*RUN, "jaxpar", *END]


def test_srun_starts_a_process_a_host_or_a_device():
    two = Hosts(launcher="slurm", count=2)
    jax, torch = (two.command("python", side, DIR, layout=FOUR) for side in (JAX, TORCH))
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"} <= set(jax)
    assert {"--nodes=2", "--ntasks=4", "--ntasks-per-node=2"} <= set(torch)
    assert jax[-5:] == [*RUN, "jaxpar", *END]
    with pytest.raises(ExperimentError, match="--hosts 3: they do not divide the layout's 4 devices"):
        Hosts(launcher="slurm", count=3).command("python", JAX, DIR, layout=FOUR)


def test_hosts_are_those_of_the_allocation(monkeypatch):
    assert find_hosts("local", 0) == HERE
    monkeypatch.setattr(several.shutil, "which", lambda name: None)
    with pytest.raises(ExperimentError, match="no srun here"):
        find_hosts("slurm", 2, environment={})
    monkeypatch.setattr(several.shutil, "which", lambda name: name)
    with pytest.raises(ExperimentError, match="begin with `salloc"):
        find_hosts("slurm", 2, environment={})
    allocation = {"SLURM_JOB_NUM_NODES": "2"}
    assert find_hosts("slurm", 0, environment=allocation).count == 2
    with pytest.raises(ExperimentError, match="--hosts 3: the allocation has 2"):
        find_hosts("slurm", 3, environment=allocation)


def test_a_reference_on_one_device_runs_on_one_host():
    for hosts in (Hosts(count=2), Hosts(launcher="torchrun", count=2, slots={"head": 1, "other": 1})):
        assert hosts.under(Layout()) == HERE
        assert hosts.under(FOUR) == hosts
    assert Hosts(launcher="slurm", count=2).under(Layout()) == Hosts(launcher="slurm", count=1)


HOSTFILE = "# two hosts\nhead slots=2\n\nother slots=2  # as many\n"


def test_a_hostfile_gives_a_line_for_each_host(tmp_path, monkeypatch):
    file = tmp_path / "hostfile"
    file.write_text(HOSTFILE)
    monkeypatch.setattr(hostfile.socket, "gethostname", lambda: "head.cluster")
    found = find_hosts("torchrun", 0, file)
    assert (found.count, found.slots) == (2, {"head": 2, "other": 2})
    for side in (JAX, TORCH):
        here = found.command("python", side, DIR, layout=FOUR)
        (other,) = found.elsewhere("python", side, DIR, layout=FOUR, platform="cpu").items()
        assert other[0] == "other"
        assert [key for key in side.environment_on_cpu if f"{key}=" not in other[1]] == []
        line = [word for word in shlex.split(other[1]) if "=" not in word and word != "env"]
        assert len(line) == len(here) - 1  # nobody holds its standard input
        differ = {one for one, two in zip(line, [w for w in here if w != END[1]], strict=True) if one != two}
        assert differ == {"1"}
    meets = here[here.index("--master-addr") + 1 : here.index("--master-port") + 2]
    assert meets[0] == "head"
    assert here[here.index("--nproc-per-node") + 1] == "2"


@pytest.mark.parametrize(
    ("launcher", "text", "here", "words"),
    [
        ("torchrun", None, "head", "give both, or none of them"),
        ("local", HOSTFILE, "head", "give both, or none of them"),
        ("torchrun", "head 2\n", "head", "line 1: head 2: give a line for each host"),
        ("torchrun", "head slots=2\nhead slots=2\n", "head", "line 2: head: is in it twice"),
        ("torchrun", "# none\n", "head", "it names no host"),
        ("torchrun", HOSTFILE, "other", "this is other: start on head"),
    ],
)
def test_a_hostfile_that_cannot_be_used_is_one_line(tmp_path, monkeypatch, launcher, text, here, words):
    monkeypatch.setattr(hostfile.socket, "gethostname", lambda: here)
    monkeypatch.setattr(hostfile.socket, "getfqdn", lambda: here)
    file = tmp_path / "hostfile"
    file.write_text(text or "")
    with pytest.raises(ExperimentError, match=words):
        find_hosts(launcher, 0, file if text is not None else None)


def test_a_hostfile_with_too_few_slots_is_refused():
    small = Hosts(launcher="torchrun", count=2, slots={"head": 2, "other": 1})
    with pytest.raises(ExperimentError, match="other slots=1: the layout's 4 devices over 2 hosts need 2"):
        small.command("python", TORCH, DIR, layout=FOUR)


def test_an_engine_does_not_inherit_the_place_of_who_starts_it():
    kept = without_place({"RANK": "1", "SLURM_PROCID": "1", "SLURM_JOB_ID": "7", "HOME": "/"})
    assert kept == {"SLURM_JOB_ID": "7", "HOME": "/"}


def test_what_hosts_of_a_test_leave_goes_to_the_run_and_not_where_it_started(tmp_path, monkeypatch):
    """A folder with a side's name, where the user is, is not the run's."""
    (tmp_path / "jaxpar").mkdir()
    monkeypatch.chdir(tmp_path)
    command = Hosts(count=2).command("python", JAX, tmp_path / "run", layout=FOUR)
    assert command[command.index("--folder") + 1] == str(tmp_path / "run")
    code = "import sys; sys.exit(3)"
    (tmp_path / "run").mkdir()
    flags = ["--hosts", "2", "--on_host", "1", "--folder", "run"]
    starter = [
        sys.executable,
        "-m",
        "compare.execute.local_hosts",
        *flags,
        sys.executable,
        "-c",
        code,
        "jaxpar",
    ]
    assert processes.run([*starter, sys.executable, "-c", code, "jaxpar"]).returncode == 3
    assert read_failure(tmp_path / "run")
    assert not list((tmp_path / "jaxpar").iterdir())


def test_the_first_process_that_fails_ends_the_others_and_is_named(tmp_path):
    wait = "import sys, time; number = sys.argv[sys.argv.index('--process') + 1]; "
    assert start_together(2, 1, [sys.executable, "-c", wait + "sys.exit(0)"], tmp_path) == 0
    assert read_failure(tmp_path) is None
    fail = wait + "number == '1' and sys.exit(3); time.sleep(600)"
    assert start_together(2, 2, [sys.executable, "-c", fail], tmp_path) == 3
    failure = read_failure(tmp_path)
    assert failure is not None
    assert (failure.rank, failure.message) == (1, "process 1 left with exit code 3")


def test_engines_on_two_hosts_agree(shardpair, tmp_path):
    """Real processes on the loopback, each with its part of the devices."""
    layout = ["--layout.dp_shard", "2", "--layout.zero", "3", "--layout.tp", "2"]
    small = ["--model.n_layer", "2", "--train.max_iters", "3"]
    engines = ["--engines", "torch-manual", "jax-manual"]
    done = shardpair("run", "check", *layout, *small, "--hosts", "2", *engines, "--run_dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "PASS: jax-manual agrees with torch-manual on 14 rungs" in done.stdout
    for engine in engines[1:]:
        record = read_record(tmp_path / "run" / engine)
        first, second = dict.fromkeys(record.manifest.hosts)
        assert second == f"{first} (2)"  # one machine
        assert strategy_of(record).found("what crosses hosts") == "the closed form of 2 hosts"
        long = [row for row in record.ledger.rows if row.bytes > SCALAR * row.calls]
        assert {row.axis for row in long if row.crossing_bytes} == {"dp_shard"}
    page = (tmp_path / "run" / "report.html").read_text()
    assert "dp_shard crosses hosts, tp stays inside one." in page
    assert "Bytes across hosts in a step, all devices together" in page
