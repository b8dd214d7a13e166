"""Engines on several hosts: what starts them, and a run on two that are this machine."""

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
from compare.execute import launchers
from compare.execute.launch import child_environment
from compare.execute.launchers import HERE, Hosts, find_hosts, print_lines, start_together
from compare.spec.engines.registry import side_of
from compare.spec.experiment import ExperimentError, Layout

JAX, TORCH = side_of("jax-manual"), side_of("torch-manual")
FOUR = Layout(dp_replicate=2, tp=2)
RUN = ["python", "-m"]
DIR = Path("/runs/mine")
END = ["/runs/mine", "--exit-with-stdin"]


def test_srun_starts_a_process_a_host_or_a_device():
    assert HERE.commands("python", JAX, DIR, layout=FOUR) == [[*RUN, "jaxpar", *END]]
    two = Hosts(launcher="slurm", count=2)
    (jax,), (torch,) = (two.commands("python", side, DIR, layout=FOUR) for side in (JAX, TORCH))
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"} <= set(jax)
    assert {"--nodes=2", "--ntasks=4", "--ntasks-per-node=2"} <= set(torch)
    bound = replace(two, options=("--gpu-bind=none", "--distribution=cyclic"))
    ((*begin, _, _, _),) = bound.commands("python", TORCH, DIR, layout=FOUR)
    assert "--gpu-bind=none" in begin
    assert begin.index("--distribution=cyclic") < begin.index("--distribution=block")  # the last one holds
    assert jax[-5:] == [*RUN, "jaxpar", *END]


def test_hosts_are_those_of_the_allocation(monkeypatch):
    assert find_hosts("local", 0) == HERE
    monkeypatch.setattr(launchers.shutil, "which", lambda name: name)
    allocation = {"SLURM_JOB_NUM_NODES": "2"}
    two = find_hosts("slurm", 0, environment=allocation, options="--gpu-bind=none --exclusive")
    assert (two.count, two.options) == (2, ("--gpu-bind=none", "--exclusive"))
    for count, there, words in ((2, {}, "begin with `salloc"), (3, allocation, "the allocation has 2")):
        with pytest.raises(ExperimentError, match=words):
            find_hosts("slurm", count, environment=there)
    monkeypatch.setattr(launchers.shutil, "which", lambda name: None)
    with pytest.raises(ExperimentError, match="no srun here"):
        find_hosts("slurm", 2, environment={})
    for launcher, count, options, words in (
        ("local", -1, "", "--hosts -1: give a number of hosts"),
        ("local", 2, "--exclusive", "add --launcher slurm"),
    ):
        with pytest.raises(ExperimentError, match=words):
            find_hosts(launcher, count, options=options)


def test_a_layout_takes_the_hosts_that_it_needs():
    for hosts in (Hosts(count=2), Hosts(launcher="torchrun", count=2, slots={"head": 1, "other": 1})):
        assert hosts.under(Layout()) == HERE
        assert hosts.under(FOUR) == hosts
    assert Hosts(launcher="slurm", count=2).under(Layout()) == Hosts(launcher="slurm", count=1)
    with pytest.raises(ExperimentError, match="--hosts 3: they do not divide the layout's 4 devices"):
        Hosts(launcher="slurm", count=3).require(FOUR)
    with pytest.raises(ExperimentError, match="other slots=1: the layout's 4 devices over 2 hosts need 2"):
        Hosts(launcher="torchrun", count=2, slots={"head": 2, "other": 1}).require(FOUR)


HOSTFILE = "# two hosts\nhead slots=2\n\nother slots=2  # as many\n"


def test_a_hostfile_gives_a_line_for_each_host(tmp_path, monkeypatch, capsys):
    file = tmp_path / "hostfile"
    file.write_text(HOSTFILE)
    monkeypatch.setattr(launchers.socket, "gethostname", lambda: "head.cluster")
    hosts = find_hosts("torchrun", 0, file)
    assert (hosts.count, hosts.slots) == (2, {"head": 2, "other": 2})
    for side in (JAX, TORCH):
        here, other = hosts.commands("python", side, DIR, layout=FOUR)
        assert here[-1] == "--exit-with-stdin"
        differ = {word for word, theirs in zip(here, other, strict=False) if word != theirs}
        assert differ == {"0" if side is TORCH else "RANK=0"}
        print_lines(hosts, [other], side, "cpu")
        printed = capsys.readouterr().err
        assert printed.startswith("on other: env ")
        assert all(f" {key}={value} " in printed for key, value in side.environment_on_cpu.items())
        assert shlex.split(printed)[-len(other) :] == other
    assert here[here.index("--master-addr") + 1] == "head"
    assert here[here.index("--nproc-per-node") + 1] == "2"
    file.write_bytes(b"\xef\xbb\xbfhead\nuser@other slots = 2 max_slots=4\n10.0.0.3 slots=1\n")
    assert find_hosts("torchrun", 0, file).slots == {"head": 1, "other": 2, "10.0.0.3": 1}
    file.write_text("127.0.0.1 slots=2\n")
    assert find_hosts("torchrun", 0, file).count == 1


def test_a_hostfile_that_cannot_be_used_is_one_line(tmp_path, monkeypatch):
    file = tmp_path / "hostfile"
    for launcher, text, here, words in (
        ("local", HOSTFILE, "head", "give both, or none of them"),
        ("torchrun", "head 2\n", "head", "line 1: head 2: give a line for each host"),
        ("torchrun", "head slots=2\nhead slots=2\n", "head", "line 2: head: is in it twice"),
        ("torchrun", HOSTFILE, "other", "this is other: start on head"),
        (
            "torchrun",
            "localhost slots=2\nother slots=2\n",
            "head",
            "name the first by what the others call it",
        ),
        ("torchrun", b"\xff\x00", "head", "it is no text"),
    ):
        monkeypatch.setattr(launchers.socket, "gethostname", lambda name=here: name)
        monkeypatch.setattr(launchers.socket, "getfqdn", lambda name=here: name)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ExperimentError, match=words):
            find_hosts(launcher, 0, file)


def test_an_engine_does_not_inherit_the_place_of_who_starts_it(monkeypatch):
    for name in ("RANK", "SLURM_PROCID", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "1")
    environment = child_environment(TORCH, "cpu")
    assert environment["SLURM_JOB_ID"] == "1"
    assert not {"RANK", "SLURM_PROCID"} & set(environment)


NUMBER = "import os, signal, sys, time; number = os.environ['RANK']; "
CONSEQUENCE = (
    "from pathlib import Path; from compare.side.process_states import Failure, State, write_state; "
    "failure = lambda text: Failure(message=text, rank=int(number), is_consequence=True); "
    "tell = lambda text: write_state(Path.cwd(), State(number=int(number), failure=failure(text))); "
)


def together(script: str, folder: Path, monkeypatch) -> tuple[int, Failure | None]:
    """Two processes on each of two hosts. Returns the exit code, and what is left in the folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(Path(launchers.__file__).parents[2]))
    return start_together(2, 2, folder, [sys.executable, "-c", NUMBER + script]), read_failure(folder)


def test_the_first_process_that_fails_ends_the_others_and_is_named(tmp_path, monkeypatch):
    assert together("sys.exit(0)", tmp_path, monkeypatch) == (0, None)
    monkeypatch.setattr(launchers.socket, "gethostname", lambda: "box")
    code, failure = together("number == '3' and sys.exit(3); time.sleep(600)", tmp_path, monkeypatch)
    assert code == 1
    assert failure == Failure(message="process 3 on box left with exit code 3", rank=3)


def test_a_process_that_was_killed_is_named_before_those_that_saw_it_go(tmp_path, monkeypatch):
    """The others write their error first, and leave first: it is not the cause."""
    late = "time.sleep(1), os.kill(os.getpid(), signal.SIGKILL)"
    others = "tell('connection closed by peer'), sys.exit(1)"
    script = f"{CONSEQUENCE}({late}) if number == '2' else ({others})"
    code, failure = together(script, tmp_path, monkeypatch)
    assert code == 1
    assert failure is not None
    assert failure.rank == 2
    assert re.search("process 2 on .*killed by SIGKILL", failure.message)


SMALL = ("--model.n_layer", "2", "--train.batch_size", "4")


def test_engines_on_two_hosts_agree_and_others_go_on_from_their_checkpoints(shardpair, tmp_path):
    """Real processes on the loopback: 2 x 2 devices, then 4 x 1 of the other framework."""
    layout = ["--layout.dp_shard", "2", "--layout.zero", "3", "--layout.tp", "2"]
    engines = ["--engines", "torch-manual", "jax-manual"]
    steps = [*SMALL, "--train.max_iters", "4", "--checkpoint.every", "2"]
    first = tmp_path / "run"
    done = shardpair("run", "check", *layout, *steps, "--hosts", "2", *engines, "--run_dir", first)
    assert done.returncode == 0, done.stderr
    assert "PASS: jax-manual agrees with torch-manual on 14 rungs" in done.stdout
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
