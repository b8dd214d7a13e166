"""Processes of one run over several hosts: which of them this one is, and where they meet.

SLURM's variables (inside `srun`), torchrun's, or `--coordinator HOST:PORT --processes N --process K` say so,
asked in that order. A run of one process needs none of them.
"""

import argparse
import re
import socket
from collections.abc import Mapping
from typing import NamedTuple

from compare.spec.experiment import ExperimentError

VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NODELIST"),
)
"""What tells a process its place: an engine that the harness starts by itself must not inherit them."""
FIRST_PORT, PORTS = 20480, 12288  # below the ports that Linux hands out by itself


class Process(NamedTuple):
    """One process among those of a run."""

    number: int
    count: int
    local: int
    """Number on its host; all numbers are from 0."""
    coordinator: str
    """HOST:PORT, where all meet; it is on process 0's host."""

    @property
    def is_first(self) -> bool:
        """True for the one that writes the record."""
        return self.number == 0

    @property
    def name(self) -> str:
        """For messages: which process, and on which host."""
        return f"process {self.number} on {socket.gethostname()}"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator."""
        host, _, port = self.coordinator.rpartition(":")
        return host, int(port)

    @property
    def variables(self) -> dict[str, str]:
        """torchrun's variables for it."""
        host, port = self.address
        numbers = {"RANK": self.number, "WORLD_SIZE": self.count, "LOCAL_RANK": self.local}
        place = {"MASTER_ADDR": host, "MASTER_PORT": port}
        return {name: str(value) for name, value in (numbers | place).items()}


def find_process(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Process | None:
    """This process's place; None if it is alone. Raises ExperimentError: they do not fit each other."""
    try:
        process = _of_slurm(environment)
        process = process if process and process.count > 1 else _of_torchrun(environment)
    except (KeyError, ValueError) as error:
        raise ExperimentError(f"the launcher's variables do not fit each other: {error}") from None
    return process or _of_flags(arguments)


def _of_slurm(environment: Mapping[str, str]) -> Process | None:
    if "SLURM_STEP_NODELIST" not in environment:  # a batch script has others of them, and is no task
        return None
    # The same port in all tasks of a step, and another one in the next step.
    job, step = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
    port = FIRST_PORT + (job * 64 + step) % PORTS
    return Process(
        number=int(environment["SLURM_PROCID"]),
        count=int(environment["SLURM_NTASKS"]),
        local=int(environment["SLURM_LOCALID"]),
        coordinator=f"{first_host(environment['SLURM_STEP_NODELIST'])}:{port}",
    )


def _of_torchrun(environment: Mapping[str, str]) -> Process | None:
    if "RANK" not in environment or environment.get("WORLD_SIZE", "1") == "1":
        return None
    return Process(
        number=int(environment["RANK"]),
        count=int(environment["WORLD_SIZE"]),
        local=int(environment.get("LOCAL_RANK", "0")),
        # torchrun's own store listens at MASTER_PORT: another service needs a port of its own.
        coordinator=f"{environment.get('MASTER_ADDR', '')}:{environment.get('MASTER_PORT', '0')}",
    )


def _of_flags(arguments: argparse.Namespace) -> Process | None:
    given = (arguments.coordinator, arguments.processes, arguments.process)
    if given == ("", 0, -1):
        return None
    host, _, port = arguments.coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= arguments.process < arguments.processes:
        raise ExperimentError(
            f"--coordinator {arguments.coordinator!r} --process {arguments.process} of --processes "
            f"{arguments.processes}: give HOST:PORT, the same to all; numbers go from 0 to N - 1"
        )
    if arguments.processes == 1:
        return None
    return Process(
        number=arguments.process,
        count=arguments.processes,
        local=arguments.local_process,
        coordinator=arguments.coordinator,
    )


def first_host(nodes: str) -> str:
    """The first host of a list as SLURM writes it: `gpu[03-06,9],login` -> `gpu03`."""
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodes)
    if not found:
        raise ValueError(f"SLURM_STEP_NODELIST = {nodes!r} names no host")
    return "".join(part or "" for part in found.groups())
