"""Start one engine on several hosts: by `srun` inside an allocation, or as processes on this machine.

The harness runs where `shardpair` was started and starts one engine after the other, as it does on one host:
an engine is one command more, whose processes find their places by themselves (`contract.processes`). All
hosts must see the folder of the run, and the same installation.

    local    one host: the engine itself. Several: its processes on this machine, on the loopback: a test
    slurm    `srun` over the hosts of the allocation (`salloc`, `sbatch`)
    torchrun the hosts of a file (`execute.hostfile`): this one's line is run, the others' are printed
"""

import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from compare.contract.other_hosts import host_of
from compare.contract.processes import VARIABLES
from compare.contract.record import Failure, read_failure, write_failure
from compare.execute.hostfile import line_elsewhere, line_of, read_hostfile, require_first
from compare.host.signals import describe_exit
from compare.spec.engines.engine import Side
from compare.spec.experiment import ExperimentError, Layout

Launcher = Literal["local", "slurm", "torchrun"]
LOOPBACK = "127.0.0.1"
POLL_S = 0.05
CAUSE_GRACE_S = 5.0
"""Processes may notice a lost one before we do, and look for the cause themselves: so long we wait for it."""
AS_CONSEQUENCE = (signal.SIGABRT, signal.SIGTERM)
"""How C++ and launchers end a process because of another one."""
PROBE_S = 60.0


class Hosts(Struct, frozen=True, kw_only=True):
    """Where engines run."""

    launcher: Launcher = "local"
    count: int = 1
    """Number of hosts."""
    slots: Mapping[str, int] = {}
    """Devices by host, of a hostfile."""

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
        for name, devices in self.slots.items():
            if layout.devices // self.count > devices:
                raise ExperimentError(
                    f"{name} slots={devices}: the layout's {layout.devices} devices over {self.count} hosts "
                    f"need {layout.devices // self.count} on each"
                )

    def command(
        self, python: str, side: Side, folder: Path, *, layout: Layout, options: Sequence[str] = ()
    ) -> list[str]:
        """The command that runs a side on these hosts.

        Args:
            python: the interpreter, at the same path on all hosts.
            side: which.
            folder: of the run.
            layout: its devices are spread evenly, host after host.
            options: of `python -m SIDE`, beside the folder.
        """
        run = [python, "-m", side.name, *options, str(folder.absolute()), "--exit-with-stdin"]
        if not self.several:
            return run
        self.require(layout)
        on_host = self._on_host(side, layout)
        if self.launcher == "torchrun":
            return line_of(0, list(self.slots), run, side, folder, on_host=on_host)
        if self.launcher == "slurm":
            return [*srun(self.count, on_host), "--kill-on-bad-exit=1", "--unbuffered", *run]
        starter = ["--hosts", str(self.count), "--on_host", str(on_host), "--folder", str(folder.absolute())]
        return [sys.executable, "-m", "compare.execute.local_hosts", *starter, *run]

    def _on_host(self, side: Side, layout: Layout) -> int:
        """Processes of a side on each host."""
        return layout.devices // self.count if side.one_process_a_device else 1

    def elsewhere(
        self,
        python: str,
        side: Side,
        folder: Path,
        *,
        layout: Layout,
        platform: str,
        options: Sequence[str] = (),
    ) -> dict[str, str]:
        """What a person has to run on the other hosts of a hostfile, by host; empty with another launcher."""
        names, run = list(self.slots), [python, "-m", side.name, *options, str(folder.absolute())]
        on_host = self._on_host(side, layout)
        return {
            name: line_elsewhere(line_of(number, names, run, side, folder, on_host=on_host), side, platform)
            for number, name in enumerate(names[1:], start=1)
        }


HERE = Hosts()
"""This machine, without a launcher."""


def find_hosts(
    launcher: Launcher,
    count: int,
    hostfile: Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Hosts:
    """The hosts that the flags ask for, that an allocation of SLURM has, or a hostfile.

    Args:
        launcher: how engines start.
        count: of hosts; 0 for all of the allocation or the file, or this one.
        hostfile: for torchrun.
        environment: has SLURM's variables.

    Raises:
        ExperimentError: there is no allocation, it has fewer hosts, or SLURM is not installed here; a
            hostfile that is missing, bad, for another launcher, or whose first host this is not.
    """
    if (hostfile is None) == (launcher == "torchrun"):
        raise ExperimentError("--launcher torchrun and --hostfile FILE: give both, or none of them")
    if hostfile:
        return _of_hostfile(hostfile, count)
    if launcher == "local":
        return Hosts(count=count or 1)
    if not shutil.which("srun"):
        raise ExperimentError("--launcher slurm: no srun here: start on a host of the cluster")
    there = environment.get("SLURM_JOB_NUM_NODES", "")
    if not there.isdecimal():
        raise ExperimentError(
            "--launcher slurm starts engines inside an allocation: begin with `salloc --nodes=N`, or put "
            "this command into a script for sbatch (docs/cluster.md)"
        )
    if count > int(there):
        raise ExperimentError(f"--hosts {count}: the allocation has {there}")
    return Hosts(launcher=launcher, count=count or int(there))


def _of_hostfile(hostfile: Path, count: int) -> Hosts:
    found = read_hostfile(hostfile)
    if count > len(found):
        raise ExperimentError(f"--hosts {count}: {hostfile} has {len(found)}")
    slots = dict(list(found.items())[: count or len(found)])
    require_first(list(slots))
    return Hosts(launcher="torchrun", count=len(slots), slots=slots)


def require_shared(folder: Path, hosts: Hosts) -> None:
    """Refuse a folder that some host does not see.

    Raises:
        ExperimentError: with the host's name.
    """
    if hosts.launcher != "slurm":
        return
    with tempfile.NamedTemporaryFile(dir=folder, prefix="probe.") as probe:
        look = f'test -e "{probe.name}" || echo "missing on $(hostname)"'
        try:
            done = subprocess.run(
                [*srun(hosts.count, 1), "sh", "-c", look],
                capture_output=True,
                text=True,
                check=False,
                timeout=PROBE_S,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            raise ExperimentError(
                f"--launcher slurm: srun began nothing in {PROBE_S:g} s: does another step hold the hosts?"
            ) from None
    if done.returncode:
        raise ExperimentError(f"--launcher slurm: {' '.join(done.stderr.split()) or 'srun failed'}")
    if missing := sorted(set(done.stdout.split("\n")) - {""}):
        raise ExperimentError(
            f"{folder}: {', '.join(missing)}: give --run_dir on a file system that all hosts share"
        )


def srun(hosts: int, on_host: int) -> list[str]:
    """The beginning of a command that starts so many tasks on each of so many hosts.

    Tasks may use all processors of the allocation: an engine has threads, or more ranks than processors.
    """
    shape = [f"--nodes={hosts}", f"--ntasks={hosts * on_host}", f"--ntasks-per-node={on_host}"]
    return ["srun", *shape, "--overcommit", "--cpu-bind=none", "--mpi=none"]


def start_together(hosts: int, on_host: int, command: Sequence[str], folder: Path) -> int:
    """Run the processes of several hosts on this machine, and wait for them. The first that fails ends all.

    Args:
        hosts: their number.
        on_host: processes on each.
        command: of a process, without what tells it its place.
        folder: of the run, for error.json.

    Returns:
        The exit code of the first that failed; 0 if none did.
    """
    count, coordinator = hosts * on_host, f"{LOOPBACK}:{free_port()}"
    running: dict[int, subprocess.Popen] = {}
    for number in range(count):
        place = ["--coordinator", coordinator, "--processes", str(count), "--process", str(number)]
        place += ["--local_process", str(number % on_host)]
        running[number] = subprocess.Popen([*command, *place] if count > 1 else [*command])
    failed: dict[int, int] = {}  # exit codes, in the order in which they were seen
    deadline = math.inf
    while running:
        codes = {number: process.poll() for number, process in running.items()}
        for number, code in codes.items():
            if code is not None:
                del running[number]
                failed |= {number: code} if code else {}
        if failed:
            deadline = min(deadline, time.monotonic() + CAUSE_GRACE_S)
            if (to_blame := _to_blame(failed, folder)) is not None or time.monotonic() > deadline:
                return _end(running, folder, to_blame if to_blame is not None else next(iter(failed)), failed)
        time.sleep(POLL_S)
    return _end({}, folder, next(iter(failed)), failed) if failed else 0


def _to_blame(failed: Mapping[int, int], folder: Path) -> int | None:
    """A process that was killed, or one that left its own error; None as long as all tell of lost peers."""
    failure = read_failure(folder)
    if failure and not failure.is_consequence:
        return next(iter(failed))
    # Who only saw another one go has left word of that, or was aborted by C++.
    causes = [n for n, code in failed.items() if (code > 0 and not failure) or _is_killed(code)]
    return min(causes, key=lambda n: not _is_killed(failed[n]), default=None)


def _is_killed(code: int) -> bool:
    return code < 0 and -code not in AS_CONSEQUENCE


def _end(others: Mapping[int, subprocess.Popen], folder: Path, number: int, failed: Mapping[int, int]) -> int:
    """End the others. Returns the exit code of the one to blame, for whom we leave a word if it could not."""
    code, failure = failed[number], read_failure(folder)
    if not failure or (failure.is_consequence and _is_killed(code)):
        host = host_of(folder, number) or socket.gethostname()
        message = f"process {number} on {host} {'was ' if code < 0 else ''}{describe_exit(code)}"
        write_failure(folder, Failure(message=message, rank=number))
    for process in others.values():
        process.kill()
    for process in others.values():
        process.wait()
    return code if code > 0 else 128 - code


def free_port() -> int:
    """A port of the loopback that nobody listens at."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]


def without_place(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what tells a process its place among others: this one's own place."""
    return {key: value for key, value in environment.items() if key not in VARIABLES}
