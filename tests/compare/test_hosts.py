"""Engines on several hosts: launchers, hostfiles, and a run on two hosts that are this machine."""

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from compare.checkpoint.description import CHECKPOINTS, checkpoints_in
from compare.checkpoint.reader import CheckpointReader
from compare.contract.record import Failure, read_failure, read_record
from compare.execute import launchers, loopback
from compare.execute.launch import child_environment
from compare.execute.launchers import HERE, Hosts, find_hosts, print_lines
from compare.execute.loopback import run_hosts
from compare.spec.engines.registry import side_of
from compare.spec.experiment import ExperimentError, Layout

JAX, TORCH = side_of("jax-manual"), side_of("torch-manual")
FOUR = Layout(dp_replicate=2, tp=2)
RUN = ["python", "-m"]
DIR = Path("/runs/mine")
END = ["/runs/mine", "--exit-with-stdin"]
SLURM = Hosts(launcher="slurm", count=2)
ALLOCATION = {"SLURM_JOB_NUM_NODES": "2"}


def test_one_host_runs_the_engine_itself():
    assert HERE.commands("python", JAX, DIR, layout=FOUR) == [[*RUN, "jaxpar", *END]]


def test_srun_starts_a_process_a_host_or_device():
    (jax,), (torch,) = (SLURM.commands("python", side, DIR, layout=FOUR) for side in (JAX, TORCH))
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"} <= set(jax)
    assert {"--nodes=2", "--ntasks=4", "--ntasks-per-node=2"} <= set(torch)
    assert jax[-5:] == [*RUN, "jaxpar", *END]


def test_srun_options_cannot_change_the_order():
    hosts = replace(SLURM, options=("--gpu-bind=none", "--distribution=cyclic"))
    (command,) = hosts.commands("python", TORCH, DIR, layout=FOUR)
    assert "--gpu-bind=none" in command
    assert command.index("--distribution=cyclic") < command.index("--distribution=block")


def test_allocation_gives_the_hosts(monkeypatch):
    assert find_hosts("local", 0) == HERE
    monkeypatch.setattr(launchers.shutil, "which", lambda name: name)
    two = find_hosts("slurm", 0, environment=ALLOCATION, options="--exclusive --comment 'two words'")
    assert (two.count, two.options) == (2, ("--exclusive", "--comment", "two words"))


@pytest.mark.parametrize(
    ("launcher", "count", "options", "srun", "environment", "message"),
    [
        ("slurm", 2, "", "srun", {}, "begin with `salloc"),
        ("slurm", 3, "", "srun", ALLOCATION, "the allocation has 2"),
        ("slurm", 2, "", None, {}, "no srun here"),
        ("local", -1, "", "srun", {}, "--hosts -1: give a number of hosts"),
        ("local", 2, "--exclusive", "srun", {}, "add --launcher slurm"),
        ("slurm", 2, "--comment 'two", "srun", ALLOCATION, "No closing quotation: quote it as for a shell"),
    ],
)
def test_host_flags_are_rejected(launcher, count, options, srun, environment, message, monkeypatch):
    monkeypatch.setattr(launchers.shutil, "which", lambda name: srun)
    with pytest.raises(ExperimentError, match=message):
        find_hosts(launcher, count, environment=environment, options=options)


@pytest.mark.parametrize(
    "hosts", [Hosts(count=2), Hosts(launcher="torchrun", count=2, slots={"head": 1, "other": 1})]
)
def test_one_device_runs_on_one_host(hosts):
    assert hosts.for_layout(Layout()) == HERE
    assert hosts.for_layout(FOUR) == hosts
    assert SLURM.for_layout(Layout()) == replace(SLURM, count=1)


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (replace(SLURM, count=3), "--hosts 3: they do not divide the layout's 4 devices"),
        (
            Hosts(launcher="torchrun", count=2, slots={"head": 2, "other": 1}),
            "other slots=1: the layout's 4 devices over 2 hosts need 2",
        ),
    ],
    ids=["count", "slots"],
)
def test_layout_must_fit_the_hosts(hosts, message):
    with pytest.raises(ExperimentError, match=message):
        hosts.require_layout(FOUR)


HOSTFILE = "# two hosts\nhead slots=2\n\nother slots=2  # as many\n"


@pytest.fixture
def hostfile(tmp_path, monkeypatch) -> Path:
    """The path of a hostfile, on the host head."""
    monkeypatch.setattr(launchers.socket, "gethostname", lambda: "head.cluster")
    monkeypatch.setattr(launchers.socket, "getfqdn", lambda: "head.cluster")
    return tmp_path / "hostfile"


@pytest.mark.parametrize("side", [JAX, TORCH], ids=["jax", "torch"])
def test_hostfile_prints_a_line_for_each_host(side, hostfile, capsys):
    hostfile.write_text(HOSTFILE)
    hosts = find_hosts("torchrun", 0, hostfile)
    assert (hosts.count, hosts.slots) == (2, {"head": 2, "other": 2})
    here, other = hosts.commands("python", side, DIR, layout=FOUR)
    assert here[-1] == "--exit-with-stdin"
    differ = {word for word, theirs in zip(here, other, strict=False) if word != theirs}
    assert differ == {"0" if side is TORCH else "RANK=0"}
    print_lines(hosts, [other], side, "cpu")
    printed = capsys.readouterr().err
    assert printed.startswith("on other: env ")
    assert all(f" {key}={value} " in printed for key, value in side.environment_on_cpu.items())
    assert shlex.split(printed)[-len(other) :] == other
    if side is TORCH:
        assert here[here.index("--master-addr") + 1] == "head"
        assert here[here.index("--nproc-per-node") + 1] == "2"


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        (
            "head\nme@other slots = 2 max_slots=4\n10.0.0.3 slots=1\n",
            {"head": 1, "other": 2, "10.0.0.3": 1},
        ),
        ("127.0.0.1 slots=2\n", {"127.0.0.1": 2}),
    ],
    ids=["forms", "loopback"],
)
def test_hostfile_gives_slots(text, slots, hostfile):
    hostfile.write_text(text)
    assert find_hosts("torchrun", 0, hostfile).slots == slots


@pytest.mark.parametrize(
    ("launcher", "text", "message"),
    [
        ("local", HOSTFILE, "give both, or none of them"),
        ("torchrun", "head 2\n", "line 1: give a line such as"),
        ("torchrun", "head slots=2\nhead slots=2\n", "line 2: head is in it twice"),
        ("torchrun", "other slots=2\nhead slots=2\n", "this is head.cluster: start on other"),
        ("torchrun", "localhost slots=2\nother slots=2\n", "give a name that the other hosts can reach"),
        ("torchrun", "# none\n", "it names no host"),
    ],
)
def test_hostfile_is_rejected(launcher, text, message, hostfile):
    hostfile.write_text(text)
    with pytest.raises(ExperimentError, match=message):
        find_hosts(launcher, 0, hostfile)


def test_engine_does_not_inherit_a_place(monkeypatch):
    for name in ("RANK", "SLURM_PROCID", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "1")
    environment = child_environment(TORCH, "cpu")
    assert environment["SLURM_JOB_ID"] == "1"
    assert not {"RANK", "SLURM_PROCID"} & set(environment)


NUMBER = "import os, signal, sys, time; number = os.environ['RANK']; "
CONSEQUENCE = (
    "from pathlib import Path; from compare.side.process_states import Failure, State, write_state; "
    "failure = lambda text: Failure(message=text, rank=int(number), is_consequence=True); "
    "report = lambda text: write_state(Path.cwd(), State(number=int(number), failure=failure(text))); "
)


def run_script(script: str, folder: Path, monkeypatch) -> tuple[int, Failure | None]:
    """Run a script as two processes on each of two hosts. Returns the exit code, and error.json."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(Path(loopback.__file__).parents[2]))
    return run_hosts(2, 2, folder, [sys.executable, "-c", NUMBER + script]), read_failure(folder)


def test_loopback_names_the_first_failure(tmp_path, monkeypatch):
    assert run_script("sys.exit(0)", tmp_path, monkeypatch) == (0, None)
    monkeypatch.setattr(loopback.socket, "gethostname", lambda: "box")
    code, failure = run_script("number == '3' and sys.exit(3); time.sleep(600)", tmp_path, monkeypatch)
    assert code == 1
    assert failure == Failure(message="process 3 on box left with exit code 3", rank=3)


def test_loopback_names_a_kill_before_its_victims(tmp_path, monkeypatch):
    """The other processes write their errors and end first."""
    late = "time.sleep(1), os.kill(os.getpid(), signal.SIGKILL)"
    others = "report('connection closed by peer'), sys.exit(1)"
    script = f"{CONSEQUENCE}({late}) if number == '2' else ({others})"
    code, failure = run_script(script, tmp_path, monkeypatch)
    assert code == 1
    assert failure is not None
    assert failure.rank == 2
    assert re.search("process 2 on .*killed by SIGKILL", failure.message)


SMALL = ("--model.n_layer", "2", "--train.batch_size", "4")


def test_two_hosts_agree_and_four_resume(shardpair, tmp_path):
    """2 x 2 devices, then 4 x 1 devices of the other framework from their checkpoint."""
    layout = ["--layout.dp_shard", "2", "--layout.zero", "3", "--layout.tp", "2"]
    engines = ["--engines", "torch-manual", "jax-manual"]
    steps = [*SMALL, "--train.max_iters", "4", "--checkpoint.every", "2"]
    first = tmp_path / "run"
    done = shardpair("run", "check", *layout, *steps, "--hosts", "2", *engines, "--run_dir", first)
    assert done.returncode == 0, done.stderr
    assert "PASS: torch-manual and jax-manual compute the same" in done.stdout
    for engine in engines[1:]:
        record = read_record(first / engine)
        name, second = dict.fromkeys(record.manifest.hosts)
        assert second == f"{name} (2)"  # one machine
    page = (first / "report.html").read_text()
    assert "Across hosts: dp_shard; inside one: tp." in page

    def state(run: Path, engine: str) -> dict[str, np.ndarray]:
        reader = CheckpointReader(checkpoints_in(run / engine / CHECKPOINTS)[4])
        groups = ("weights", "m", "v")
        return {f"{group} {name}": array for group in groups for name, array in reader.group(group).items()}

    expected = state(first, "torch-manual")
    kept, run = checkpoints_in(first / "jax-manual" / CHECKPOINTS)[2], tmp_path / "resumed"
    how = ["--engines", "torch-manual", "--no_ladder", "--hosts", "4", "--run_dir", run]
    done = shardpair("resume", kept, *how, "--train.max_iters", "4", "--checkpoint.every", "2")
    assert done.returncode == 0, done.stderr
    for name, array in state(run, "torch-manual").items():
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=1e-10 * abs(expected[name]).max())
