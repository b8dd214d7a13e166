"""Two hosts with a link between them, by hand and under SLURM: the message when one is lost.

Hosts are network namespaces of this machine on a bridge, each with a name and an address. They need root and
iproute2; without these the tests skip, with the reason. Programs on them are real interpreters: a fork of a
warm server would live in the server's namespace.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from compare.contract.record import read_failure
from compare.side.processes import Process
from tests.support import endless, processes
from tests.support.endless import steps, wait_for_steps
from tests.support.processes import PATIENCE_S, start, wait_for

ROOT = Path(__file__).parents[2]
BY_HAND = ("ip", "nsenter", "unshare")
SLURM = ("slurmctld", "slurmd", "salloc", "srun", "munged")
CONF = """
ClusterName=tests
SlurmctldHost=control({control})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
PartitionName=tests Nodes=ALL Default=YES State=UP
"""


class NetHosts:
    """Some hosts that reach each other, called host0, host1 and so on; their configuration is in a folder."""

    def __init__(self, count: int, folder: Path):
        self.count, self.folder, self._mark = count, folder, f"t{os.getpid()}"
        self._net = f"10.78.{os.getpid() % 250}"

    def address(self, number: int) -> str:
        """The address of a host."""
        return f"{self._net}.{number + 1}"

    def command(self, number: int, command: list[str]) -> list[str]:
        """A command as it runs on a host."""
        enter = ["nsenter", f"--net=/run/netns/{self._mark}-{number}", "unshare", "--uts", "--mount"]
        be = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
        return [*enter, "sh", "-c", be, f"host{number}", str(self.folder / "hosts"), *command]

    def link(self, number: int, state: str) -> None:
        """Cut a host's link, `down`, or put it back, `up`."""
        run_here("ip", "link", "set", f"{self._mark}v{number}", state)

    def up(self) -> None:
        """Make them. Raises CalledProcessError: the system does not allow it."""
        names = [f"{self.address(number)} host{number}" for number in range(self.count)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        bridge = f"{self._mark}b"
        run_here("ip", "link", "add", bridge, "type", "bridge")
        run_here("ip", "addr", "add", f"{self._net}.254/24", "dev", bridge)
        run_here("ip", "link", "set", bridge, "up")
        for number in range(self.count):
            name, link = f"{self._mark}-{number}", f"{self._mark}v{number}"
            run_here("ip", "netns", "add", name)
            run_here("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            run_here("ip", "link", "set", link, "master", bridge, "up")
            run_here("ip", "-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                run_here("ip", "-n", name, "link", "set", device, "up")

    def down(self) -> None:
        """Remove the hosts, also hosts that were made in part."""
        links = [f"{self._mark}v{number}" for number in range(self.count)]  # a namespace ends some time later
        gone = [["link", "del", name] for name in (*links, f"{self._mark}b")]
        gone += [["netns", "del", f"{self._mark}-{number}"] for number in range(self.count)]
        for command in gone:
            subprocess.run(["ip", *command], capture_output=True, check=False)

    @contextmanager
    def slurm(self, cpus: int = 4) -> Generator[dict[str, str]]:
        """A SLURM over them, as long as the block lasts. Yields the environment of its commands."""
        require(SLURM)
        if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode:
            pytest.skip("munged does not run: start it for the tests of SLURM")
        conf = self.folder / "slurm.conf"
        nodes = [
            f"NodeName=host{n} NodeAddr={self.address(n)} CPUs={cpus} RealMemory=1000"
            for n in range(self.count)
        ]
        port = 20000 + os.getpid() % 10000
        filled = CONF.format(control=f"{self._net}.254", port=port, folder=self.folder)
        conf.write_text("\n".join([*nodes, filled]))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        (self.folder / "state").mkdir()
        environment = {**os.environ, "SLURM_CONF": str(conf)}
        control = ["unshare", "--uts", "sh", "-c", "hostname control && exec slurmctld -D -i"]
        hosts = [self.command(n, ["slurmd", "-D", "-N", f"host{n}"]) for n in range(self.count)]
        daemons = [start(command, env=environment) for command in (control, *hosts)]

        def states() -> str:
            asked = ["sinfo", "--noheader", "--format=%T"]
            return subprocess.run(asked, env=environment, capture_output=True, text=True, check=False).stdout

        try:
            wait_for(lambda: "idle" in states().split(), daemons[0])
            yield environment
        finally:
            for daemon in daemons[::-1]:
                daemon.kill()
                daemon.communicate()


@contextmanager
def net_hosts(count: int, folder: Path) -> Generator[NetHosts]:
    """Hosts as long as the block lasts; a test skips where they cannot be made."""
    require(BY_HAND)
    if os.geteuid():
        pytest.skip("hosts of network namespaces need root")
    hosts = NetHosts(count, folder)
    try:
        hosts.up()
    except subprocess.CalledProcessError as error:
        hosts.down()
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
    try:
        yield hosts
    finally:
        hosts.down()


def require(programs: tuple[str, ...]) -> None:
    if missing := [program for program in programs if not shutil.which(program)]:
        pytest.skip(f"not installed here: {', '.join(missing)}")


def run_here(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)


@pytest.mark.slow
def test_cut_link_is_named(tmp_path):
    with net_hosts(2, tmp_path) as hosts:
        endless.write_request(tmp_path, devices=2, timeout_s=8.0)  # a link that is back needs seconds
        run = [sys.executable, "-m", "torchpar", str(tmp_path)]  # a user's command on each host
        places = [Process(k, 2, 0, hosts.address(0), 29511).variables for k in range(2)]
        lines = [["env", *(f"{key}={value}" for key, value in place.items()), *run] for place in places]
        both = [processes.start(hosts.command(k, line), cwd=ROOT) for k, line in enumerate(lines)]
        wait_for_steps(tmp_path, both[0])
        hosts.link(1, "down")
        time.sleep(1.0)
        hosts.link(1, "up")
        wait_for_steps(tmp_path, both[0], steps(tmp_path) + 4)
        hosts.link(1, "down")
        ended = [process.communicate(timeout=PATIENCE_S) and process.returncode for process in both]
    assert ended == [1, 1]
    failure = read_failure(tmp_path)
    assert failure is not None
    assert re.search(r"is the link between them cut|process \d on host\d stayed in step", failure.message)


@pytest.mark.slow
def test_printed_line_starts_the_other_host(tmp_path):
    with net_hosts(2, tmp_path) as hosts:
        (tmp_path / "hostfile").write_text("host0\nhost1\n")
        run = ["run", "check", "--launcher", "torchrun", "--hostfile", "hostfile", "--run_dir", "run"]
        small = ["--engines", "torch-manual", "--layout.dp_replicate", "2", "--model.n_layer", "1"]
        options = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
        command = [sys.executable, "-m", "compare", *run, *small, "--train.max_iters", "2", "--no_ladder"]
        first, line = processes.start(hosts.command(0, command), **options), ""
        while first.poll() is None and not line.startswith("on host1: "):
            line = first.stderr.readline()
        other = shlex.split(line.removeprefix("on host1: "))
        second = processes.run(hosts.command(1, other), **options)
        _, errors = first.communicate(timeout=PATIENCE_S)
    assert (first.returncode, second.returncode) == (0, 0), errors + second.stderr


@pytest.mark.slow
def test_slurm_names_the_host_of_a_kill(tmp_path):
    with net_hosts(2, tmp_path) as hosts, hosts.slurm() as environment:
        folder = tmp_path / "run"
        run = ["run", "check", "--launcher", "slurm", "--engines", "jax-manual", "--run_dir", str(folder)]
        endless = ["--train.max_iters", "1000000", "--layout.dp_replicate", "2", "--model.n_layer", "1"]
        shardpair = [sys.executable, "-m", "compare", *run, *endless, "--no_ladder"]
        environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        wrong = [*shardpair, "--run_dir", str(tmp_path / "other"), "--launcher_options=--nonsense"]
        refused = processes.run(["salloc", "--quiet", "--nodes=2", *wrong], env=environment, cwd=tmp_path)
        assert refused.returncode == 1
        assert "srun: unrecognized option '--nonsense'" in refused.stderr.splitlines()[-1]
        started = processes.start(
            ["salloc", "--quiet", "--nodes=2", *shardpair], env=environment, cwd=tmp_path
        )
        engine = folder / "jax-manual"
        wait_for_steps(engine, started)
        (second,) = (p for p in sides(engine) if p.environ().get("SLURM_PROCID") == "1")
        second.kill()
        _, errors = started.communicate(timeout=PATIENCE_S)
        assert started.returncode == 1
        assert "srun: error: host1: task 1: Killed" in errors.splitlines()[-1]
        assert not sides(engine)


def sides(folder: Path) -> list[psutil.Process]:
    """The processes of jaxpar with this folder, on all hosts."""
    begin, found = [sys.executable, "-m", "jaxpar", str(folder)], psutil.process_iter(["cmdline"])
    return [process for process in found if (process.info["cmdline"] or [])[:4] == begin]
