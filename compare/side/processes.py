"""Processes of one run over several hosts: which of them this one is, and where they meet.

SLURM's variables say so (inside `srun`), or else torchrun's, which anybody can set. A run of one process
needs none of them.
"""

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
    host: str
    """Where all meet, and at which port; it is process 0's host."""
    port: int

    @property
    def is_first(self) -> bool:
        """True for the one that writes the record."""
        return self.number == 0

    @property
    def name(self) -> str:
        """For messages: which process, and on which host."""
        return f"process {self.number} on {socket.gethostname()}"

    @property
    def variables(self) -> dict[str, str]:
        """torchrun's variables for it."""
        numbers = {"RANK": self.number, "WORLD_SIZE": self.count, "LOCAL_RANK": self.local}
        place = {"MASTER_ADDR": self.host, "MASTER_PORT": self.port}
        return {name: str(value) for name, value in (numbers | place).items()}


def find_process(environment: Mapping[str, str]) -> Process | None:
    """This process's place; None if it is alone. Raises ExperimentError: variables do not fit each other."""
    try:
        # A batch script has others of SLURM's variables, and is no task.
        if "SLURM_STEP_NODELIST" in environment and (count := int(environment["SLURM_NTASKS"])) > 1:
            # The same port in all tasks of a step, and another one in the next step.
            job, step = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
            return Process(
                number=int(environment["SLURM_PROCID"]),
                count=count,
                local=int(environment["SLURM_LOCALID"]),
                host=first_host(environment["SLURM_STEP_NODELIST"]),
                port=FIRST_PORT + (job * 64 + step) % PORTS,
            )
        if "RANK" in environment and (count := int(environment.get("WORLD_SIZE", "1"))) > 1:
            return Process(
                number=int(environment["RANK"]),
                count=count,
                local=int(environment.get("LOCAL_RANK", "0")),
                host=environment.get("MASTER_ADDR", ""),
                port=int(environment.get("MASTER_PORT", "0")),
            )
    except (KeyError, ValueError) as error:
        raise ExperimentError(f"the launcher's variables do not fit each other: {error}") from None
    return None


def first_host(nodes: str) -> str:
    """The first host of a list as SLURM writes it: `rack[1-2]gpu[03-06,9],login` -> `rack1gpu03`."""
    found = re.match(r"(?:[^\[,]|\[[^\]]*\])+", nodes)
    if not found:
        raise ValueError(f"SLURM_STEP_NODELIST = {nodes!r} names no host")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", found[0])


def address_towards(host: str, port: int) -> str:
    """This host's own address as another sees it. Raises ExperimentError: there is no such host or port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        try:
            probe.connect((host, port))
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", "") or error
            raise ExperimentError(f"{host}:{port} (the coordinator): {why}") from None
        return probe.getsockname()[0]
