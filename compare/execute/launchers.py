"""Start one engine on several hosts: by `srun`, by a line a host, or as processes of this machine.

The harness starts one engine after the other, as on one host: its processes find their places by themselves
(`compare.side.processes`). All hosts must see the folder of the run, and the same installation.

    local    one host: the engine itself. Several: its processes on this machine, on the loopback: a test
    slurm    `srun` over the hosts of the allocation (`salloc`, `sbatch`)
    torchrun the hosts of a file; we run the first one's line and print those of the others
"""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import psutil
from msgspec import Struct
from msgspec.structs import replace

from compare.contract.record import leave_failure
from compare.side.process_states import find_first_cause
from compare.side.processes import FIRST_PORT, PORTS, Process
from compare.spec.engines.engine import Side
from compare.spec.experiment import ExperimentError, Layout

Launcher = Literal["local", "slurm", "torchrun"]
LOOPBACK = "127.0.0.1"
POLL_S = 0.05
_LINE = re.compile(r"(?:[^@\s]+@)?([^@=\s]+)(?:\s+slots\s*=\s*([1-9]\d*))?(?:\s+max_slots\s*=\s*\d+)?")


class Hosts(Struct, frozen=True, kw_only=True):
    """Where engines run."""

    launcher: Launcher = "local"
    count: int = 1
    """Number of hosts."""
    slots: Mapping[str, int] = {}
    """Devices by host, of a hostfile."""
    options: tuple[str, ...] = ()
    """More words for `srun`."""

    @property
    def several(self) -> bool:
        """True unless the engine is one command on this machine, as it is without any launcher."""
        return self.count > 1 or self.launcher != "local"

    def under(self, layout: Layout) -> "Hosts":
        """The hosts that a layout needs: a reference on one device runs on the first."""
        if layout.devices > 1 or self.count == 1:
            return self
        return replace(self, count=1) if self.launcher == "slurm" else HERE

    def require(self, layout: Layout) -> None:
        """Refuse a layout whose devices the hosts do not divide. Raises ExperimentError."""
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

    def commands(
        self, python: str, side: Side, folder: Path, *, layout: Layout, options: Sequence[str] = ()
    ) -> list[list[str]]:
        """The commands that run a side, the one for this host first; the others are for a person.

        The interpreter is at the same path on all hosts; a layout's devices are spread evenly, host after
        host.
        """
        self.require(layout)
        run = ["-m", side.name, *options, str(folder.absolute())]
        here = [python, *run, "--exit-with-stdin"]
        if not self.several:
            return [here]
        on_host = self.processes_on_host(side, layout)
        if self.launcher == "slurm":
            return [[*self.srun(on_host), "--kill-on-bad-exit=1", "--unbuffered", "--label", *here]]
        if self.launcher == "local":
            starter = [sys.executable, "-m", __name__, str(self.count), str(on_host), str(folder.absolute())]
            return [[*starter, *here]]
        first = next(iter(self.slots))
        port = FIRST_PORT + zlib.crc32(str(folder.absolute()).encode()) % PORTS  # one for each run
        lines = []
        for number in range(self.count):
            stdin = ["--exit-with-stdin"] if number == 0 else []  # of the others nobody holds it
            if side.one_process_a_device:
                place = f"--nnodes {self.count} --node-rank {number} --nproc-per-node {on_host} "
                place += f"--master-addr {first} --master-port {port}"
                lines.append([python, "-m", "torch.distributed.run", *place.split(), *run, *stdin])
            else:
                place = Process(number, self.count, 0, first, port).variables
                lines.append(["env", *(f"{k}={v}" for k, v in place.items()), python, *run, *stdin])
        return lines

    def srun(self, on_host: int) -> list[str]:
        """The beginning of a command that starts so many tasks on each host.

        Tasks may use all processors of the allocation: an engine has threads, or more ranks than processors.
        The shape comes last: a layout holds for it, whatever the user or the site prefers.
        """
        shape = [f"--nodes={self.count}", f"--ntasks={self.count * on_host}", f"--ntasks-per-node={on_host}"]
        usual = ["--overcommit", "--cpu-bind=none", "--mpi=none"]
        return ["srun", *usual, *self.options, *shape, "--distribution=block"]

    def processes_on_host(self, side: Side, layout: Layout) -> int:
        """How many processes of a side each host has."""
        return layout.devices // self.count if side.one_process_a_device else 1


HERE = Hosts()
"""This machine, without a launcher."""


def find_hosts(
    launcher: Launcher,
    count: int,
    hostfile: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    *,
    options: str = "",
) -> Hosts:
    """The hosts that the flags ask for, that an allocation of SLURM has, or a hostfile.

    A count of 0 is all of the allocation or the file, or this one; `options` are for `srun`. Raises
    ExperimentError: there is no allocation, or it has fewer hosts; or the hostfile cannot be used.
    """
    if count < 0:
        raise ExperimentError(f"--hosts {count}: give a number of hosts, or 0 for all")
    if options and launcher != "slurm":
        raise ExperimentError(f"--launcher_options {options}: they are for srun: add --launcher slurm")
    if (hostfile is None) == (launcher == "torchrun"):
        raise ExperimentError("--launcher torchrun and --hostfile FILE: give both, or none of them")
    if launcher == "local":
        return Hosts(count=count or 1)
    if hostfile:
        slots = read_hostfile(hostfile)
        there, place = len(slots), f"{hostfile}"
    else:
        if not shutil.which("srun"):
            raise ExperimentError("--launcher slurm: no srun here: start on a host of the cluster")
        if not environment.get("SLURM_JOB_NUM_NODES"):
            raise ExperimentError(
                "--launcher slurm starts engines inside an allocation: begin with `salloc --nodes=N`, or put "
                "this command into a script for sbatch (docs/cluster.md)"
            )
        slots, there, place = {}, int(environment["SLURM_JOB_NUM_NODES"]), "the allocation"
    if count > there:
        raise ExperimentError(f"--hosts {count}: {place} has {there}")
    count = count or there
    slots = dict(list(slots.items())[:count])
    return Hosts(launcher=launcher, count=count, slots=slots, options=tuple(options.split()))


def read_hostfile(path: Path) -> dict[str, int]:
    """Devices by host, in the order of a file such as DeepSpeed and Open MPI read: `host0 slots=4` a line.

    A host without slots has one; a login name before it and max_slots are passed over. Raises
    ExperimentError: a line of another form, a host twice, or another first host than this one.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ExperimentError(f"--hostfile {path}: {why}") from None
    slots: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not (words := line.partition("#")[0].strip()):
            continue
        match = _LINE.fullmatch(words)
        if not match or match[1] in slots:
            why = "is in it twice" if match else "give a line for each host, such as `host0 slots=4`"
            raise ExperimentError(f"--hostfile {path}, line {number}: {match[1] if match else words}: {why}")
        slots[match[1]] = int(match[2] or 1)
    if not slots:
        raise ExperimentError(f"--hostfile {path}: it names no host: give lines such as `host0 slots=4`")
    first, here = next(iter(slots)), socket.gethostname()
    if first in ("localhost", LOOPBACK) and len(slots) > 1:
        raise ExperimentError(f"--hostfile {path}: {first}: name the first by what the others call it")
    addresses = {address.address for of_one in psutil.net_if_addrs().values() for address in of_one}
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


def start_together(hosts: int, on_host: int, folder: Path, command: Sequence[str]) -> int:
    """Run the processes of several hosts on this machine, and wait for them. The first that fails ends all.

    Returns its exit code, 0 if none did, and leaves in the folder which it was. `command` is that of a
    process, without its place.
    """
    count, running = hosts * on_host, list[subprocess.Popen]()
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    for number in range(count):
        place = Process(number, count, number % on_host, LOOPBACK, port)
        running.append(subprocess.Popen(command, env=os.environ | place.variables))

    def failed() -> dict[int, int]:
        return {number: code for number, process in enumerate(running) if (code := process.poll())}

    while not failed():
        if all(process.poll() == 0 for process in running):
            return 0
        time.sleep(POLL_S)
    here = socket.gethostname()
    cause = find_first_cause(folder, failed, lambda n: f"process {n} on {here}")
    for process in running:
        process.kill()
        process.wait()
    leave_failure(folder, cause)  # now that none of them writes there
    return cause.exit_code


if __name__ == "__main__":
    sys.exit(start_together(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
