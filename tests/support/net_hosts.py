"""Hosts on one machine: network namespaces on a bridge, each with a name and an address; SLURM over them.

They need root and iproute2; without these the tests skip, with the reason. Programs on
them are real interpreters: a fork of a warm server would live in the server's namespace.
"""

import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.processes import start, wait_for

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
        _run("ip", "link", "set", f"{self._mark}v{number}", state)

    def up(self) -> None:
        """Make them. Raises CalledProcessError: the system does not allow it."""
        names = [f"{self.address(number)} host{number}" for number in range(self.count)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        bridge = f"{self._mark}b"
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{self._net}.254/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for number in range(self.count):
            name, link = f"{self._mark}-{number}", f"{self._mark}v{number}"
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", link, "master", bridge, "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _run("ip", "-n", name, "link", "set", device, "up")

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
        _require(SLURM)
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
    _require(BY_HAND)
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


def _require(programs: tuple[str, ...]) -> None:
    if missing := [program for program in programs if not shutil.which(program)]:
        pytest.skip(f"not installed here: {', '.join(missing)}")


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)
