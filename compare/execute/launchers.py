"""Launchers: how the processes of one engine start on one or several hosts.

The harness starts one engine after the other; its processes find their places themselves
(`compare.side.processes`). All hosts must share the folder of the run, and have the same installation.

    local      one host: the engine itself; several: all processes on this machine, on the loopback, as a test
    slurm      `srun` over the hosts of the allocation (`salloc`, `sbatch`)
    torchrun   the hosts of a file: this host's command runs, and the commands for the other hosts are printed
"""

import os
import re
import shlex
import shutil
import socket
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import psutil
from msgspec import Struct
from msgspec.structs import replace

from compare.side.processes import FIRST_PORT, PORTS, Process
from compare.spec.engines.engine import Side
from compare.spec.experiment import ExperimentError, Layout

Launcher = Literal["local", "slurm", "torchrun"]
LOOPBACK = "127.0.0.1"
HOST = re.compile(
    r"(?:\S+@)?(?P<host>[^@=\s]+)(\s+slots\s*=\s*(?P<slots>[1-9]\d*))?(\s+max_slots\s*=\s*\d+)?"
)


class Hosts(Struct, frozen=True, kw_only=True):
    """The hosts of an engine, and its launcher."""

    launcher: Launcher = "local"
    count: int = 1
    """The number of hosts."""
    slots: Mapping[str, int] = {}
    """Devices by host, from a hostfile."""
    options: tuple[str, ...] = ()
    """Further options of `srun`."""
    elsewhere: bool = False
    """True in a dry run outside of the hosts, about which nothing is known."""

    @property
    def several(self) -> bool:
        """False if the engine is one command on this machine."""
        return self.count > 1 or self.launcher != "local"

    def for_layout(self, layout: Layout) -> "Hosts":
        """The hosts that a layout needs: a layout of one device runs on the first host."""
        if layout.devices > 1 or self.count == 1:
            return self
        return replace(self, count=1) if self.launcher == "slurm" else HERE

    def require_layout(self, layout: Layout) -> None:
        """Reject a layout whose devices do not divide by the hosts. Raises ExperimentError."""
        if layout.devices % self.count:
            raise ExperimentError(
                f"--hosts {self.count}: they do not divide the layout's {layout.devices} devices: choose "
                "degrees whose product they divide"
            )
        on_host = layout.devices // self.count
        for name, devices in self.slots.items():
            if on_host > devices:
                raise ExperimentError(
                    f"{name} slots={devices}: the layout's {layout.devices} devices over {self.count} hosts "
                    f"need {on_host} on each"
                )

    def processes_on_host(self, side: Side, layout: Layout) -> int:
        """The number of a side's processes on each host."""
        return layout.devices // self.count if side.one_process_a_device else 1

    def commands(
        self, python: str, side: Side, folder: Path, *, layout: Layout, options: Sequence[str] = ()
    ) -> list[list[str]]:
        """The commands that run a side: this host's, then those for the user to start on the other hosts.

        The interpreter is at the same path on all hosts. Devices are numbered host after host.
        """
        self.require_layout(layout)
        run = ["-m", side.name, *options, str(folder.absolute())]
        here = [python, *run, "--exit-with-stdin"]
        if not self.several:
            return [here]
        on_host = self.processes_on_host(side, layout)
        if self.launcher == "slurm":
            return [[*self._srun(on_host), *here]]
        if self.launcher == "local":
            loopback = [sys.executable, "-m", "compare.execute.loopback"]
            return [[*loopback, str(self.count), str(on_host), str(folder.absolute()), *here]]
        first = next(iter(self.slots))
        port = FIRST_PORT + zlib.crc32(str(folder.absolute()).encode()) % PORTS  # another one for each run
        lines = []
        for number in range(self.count):
            # The standard input of a user's shell may end at any time.
            stdin = ["--exit-with-stdin"] if number == 0 else []
            if side.one_process_a_device:
                place = f"--nnodes {self.count} --node-rank {number} --nproc-per-node {on_host} "
                place += f"--master-addr {first} --master-port {port}"
                lines.append([python, "-m", "torch.distributed.run", *place.split(), *run, *stdin])
            else:
                place = Process(number, self.count, 0, first, port).variables
                lines.append(["env", *(f"{k}={v}" for k, v in place.items()), python, *run, *stdin])
        return lines

    def _srun(self, on_host: int) -> list[str]:
        """`srun` with `on_host` tasks on each host.

        Tasks may use all processors of the allocation, because an engine has threads or more ranks than
        processors. The number and order of tasks come last: the layout needs them, whatever the user prefers.
        """
        usual = ["--overcommit", "--cpu-bind=none", "--mpi=none"]
        ends = ["--kill-on-bad-exit=1", "--unbuffered", "--label"]
        shape = [f"--nodes={self.count}", f"--ntasks={self.count * on_host}", f"--ntasks-per-node={on_host}"]
        return ["srun", *usual, *self.options, *shape, "--distribution=block", *ends]


HERE = Hosts()
"""This machine, without a launcher."""


def find_hosts(
    launcher: Launcher,
    count: int,
    hostfile: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    *,
    options: str = "",
    dry_run: bool = False,
) -> Hosts:
    """The hosts of the flags, of a SLURM allocation or of a hostfile.

    A `count` of 0 takes all hosts of the allocation or file, or this one; `options` are of `srun`. A dry run
    needs no allocation. Raises ExperimentError: flags contradict each other, there are fewer hosts, or the
    hostfile is invalid.
    """
    if count < 0:
        raise ExperimentError(f"--hosts {count}: give a number of hosts, or 0 for all")
    if options and launcher != "slurm":
        raise ExperimentError(f"--launcher_options {options}: they are for srun: add --launcher slurm")
    if (hostfile is None) == (launcher == "torchrun"):
        raise ExperimentError("--launcher torchrun and --hostfile FILE: give both, or none of them")
    if launcher == "local":
        return Hosts(count=count or 1)
    elsewhere = False
    if hostfile:
        slots = read_hostfile(hostfile)
        available, place = len(slots), f"{hostfile}"
    elif elsewhere := dry_run and not environment.get("SLURM_JOB_NUM_NODES"):
        slots, available, place = {}, count or 1, ""
    else:
        if not shutil.which("srun"):
            raise ExperimentError("--launcher slurm: no srun here: start on a host of the cluster")
        if not environment.get("SLURM_JOB_NUM_NODES"):
            raise ExperimentError(
                "--launcher slurm needs an allocation: begin with `salloc --nodes=N`, or put this command "
                "into a script for sbatch (docs/cluster.md)"
            )
        slots, available, place = {}, int(environment["SLURM_JOB_NUM_NODES"]), "the allocation"
    if count > available:
        raise ExperimentError(f"--hosts {count}: {place} has {available}")
    count = count or available
    slots = dict(list(slots.items())[:count])
    try:
        words = tuple(shlex.split(options))
    except ValueError as error:
        raise ExperimentError(f"--launcher_options={options}: {error}: quote it as for a shell") from None
    return Hosts(launcher=launcher, count=count, slots=slots, options=words, elsewhere=elsewhere)


def read_hostfile(path: Path) -> dict[str, int]:
    """Devices by host, from a file with lines `host0 slots=4`, in its order.

    A host without slots has one device. A login name and max_slots are ignored, as the file may be that of
    DeepSpeed or Open MPI. Raises ExperimentError: a line is invalid, a host occurs twice, or this is not the
    first host.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ExperimentError(f"--hostfile {path}: {getattr(error, 'strerror', 'no text file')}") from None
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not (words := line.partition("#")[0].strip()):
            continue
        if not (match := HOST.fullmatch(words)):
            raise ExperimentError(f"--hostfile {path}, line {number}: give a line such as `host0 slots=4`")
        if match["host"] in slots:
            raise ExperimentError(f"--hostfile {path}, line {number}: {match['host']} is in it twice")
        slots[match["host"]] = int(match["slots"] or 1)
    if not slots:
        raise ExperimentError(f"--hostfile {path}: it names no host: give lines such as `host0 slots=4`")
    first, here = next(iter(slots)), socket.gethostname()
    if first in ("localhost", LOOPBACK) and len(slots) > 1:
        raise ExperimentError(f"--hostfile {path}: {first}: give a name that the other hosts can reach")
    addresses = {address.address for interface in psutil.net_if_addrs().values() for address in interface}
    if first not in {here, here.partition(".")[0], socket.getfqdn(), "localhost", *addresses}:
        raise ExperimentError(f"--launcher torchrun: this is {here}: start on {first}, the file's first host")
    return slots


def print_lines(
    hosts: Hosts, commands: Sequence[Sequence[str]], side: Side, platform: str, source: Path | None = None
) -> None:
    """Print the commands for the other hosts, with the side's environment; `source` as in `run_side`."""
    environment = dict(side.environment) | dict(side.environment_on_cpu if platform == "cpu" else {})
    environment |= {"PYTHONPATH": str(source.absolute())} if source else {}
    pairs = [f"{key}={value}" for key, value in environment.items()]
    for name, command in zip(list(hosts.slots)[1:], commands, strict=True):
        print(f"on {name}: {shlex.join(['env', *pairs, *command])}", file=sys.stderr, flush=True)
