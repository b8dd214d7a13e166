"""The place of this process among the processes of a run, and where they meet.

A launcher sets variables: torchrun's names, which a user can set, too, or SLURM's inside `srun`. A run of one
process needs none.
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
"""Variables of a place. An engine that the harness starts must not inherit them."""
FIRST_PORT, PORTS = 20480, 12288  # below the range from which Linux chooses ports


class Process(NamedTuple):
    """The place of one process. All numbers begin at 0."""

    number: int
    count: int
    local: int
    """The number on its host."""
    host: str
    """The host of process 0, where all processes meet, at `port`."""
    port: int

    @property
    def is_first(self) -> bool:
        """True for the process that writes the record."""
        return self.number == 0

    @property
    def name(self) -> str:
        """The number and the host, for messages."""
        return f"process {self.number} on {socket.gethostname()}"

    @property
    def variables(self) -> dict[str, str]:
        """torchrun's variables for this place."""
        numbers = {"RANK": self.number, "WORLD_SIZE": self.count, "LOCAL_RANK": self.local}
        place = {"MASTER_ADDR": self.host, "MASTER_PORT": self.port}
        return {name: str(value) for name, value in (numbers | place).items()}


def find_process(environment: Mapping[str, str]) -> Process | None:
    """The place of this process; None if it is the only one. Under srun, torchrun's variables come first.

    Raises ExperimentError: a variable is missing or no number.
    """
    try:
        if "RANK" in environment and (count := int(environment.get("WORLD_SIZE", "1"))) > 1:
            return Process(
                number=int(environment["RANK"]),
                count=count,
                local=int(environment.get("LOCAL_RANK", "0")),
                host=environment["MASTER_ADDR"],
                port=int(environment["MASTER_PORT"]),
            )
        # A batch script has other variables of SLURM, and is not a task.
        if "SLURM_STEP_NODELIST" in environment and (count := int(environment["SLURM_NTASKS"])) > 1:
            # All tasks of a step have one port, and the next step has another.
            job, step = int(environment["SLURM_JOB_ID"]), int(environment["SLURM_STEP_ID"])
            return Process(
                number=int(environment["SLURM_PROCID"]),
                count=count,
                local=int(environment["SLURM_LOCALID"]),
                host=first_host(environment["SLURM_STEP_NODELIST"]),
                port=FIRST_PORT + (job * 64 + step) % PORTS,
            )
    except (KeyError, ValueError) as error:
        raise ExperimentError(
            f"the launcher's variables are incomplete: {error}: set {', '.join(VARIABLES[:3])}, "
            f"{' and '.join(VARIABLES[4:6])}"
        ) from None
    return None


def first_host(nodes: str) -> str:
    """The first host of a SLURM list: `rack[1-2]gpu[03-06,9],login` -> `rack1gpu03`."""
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])+", nodes)
    if not first:
        raise ValueError(f"SLURM_STEP_NODELIST = {nodes!r} names no host")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def address_towards(host: str, port: int) -> str:
    """This host's own address on the way to another host. Raises ExperimentError: no such host or port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        try:
            probe.connect((host, port))
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", "") or error
            raise ExperimentError(f"{host}:{port} (the coordinator): {why}") from None
        return probe.getsockname()[0]
