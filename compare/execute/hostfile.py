"""Hosts without a scheduler: a hostfile as DeepSpeed and Open MPI read it, and the line that each host runs.

    host0 slots=4        # a name, and how many devices it has
    host1 slots=4

torchpar's processes are started by torchrun, a line a host; jaxpar's one process a host needs no starter.
Nobody here reaches another host: the harness runs on the first one, runs its own line and prints the others.
"""

import re
import shlex
import socket
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

from compare.contract.processes import FIRST_PORT, PORTS
from compare.spec.engines.engine import Side
from compare.spec.experiment import ExperimentError

_LINE = re.compile(r"(\S+)\s+slots=([1-9]\d*)")


def read_hostfile(path: Path) -> dict[str, int]:
    """Devices by host, in the order of the file.

    Raises:
        ExperimentError: no such file, a line of another form, a host twice, or no host at all.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ExperimentError(f"--hostfile {path}: {error.strerror}") from None
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not (words := line.partition("#")[0].strip()):
            continue
        match = _LINE.fullmatch(words)
        if not match or match[1] in found:
            why = "is in it twice" if match else "give a line for each host, such as `host0 slots=4`"
            raise ExperimentError(f"--hostfile {path}, line {number}: {match[1] if match else words}: {why}")
        found[match[1]] = int(match[2])
    if not found:
        raise ExperimentError(f"--hostfile {path}: it names no host: give lines such as `host0 slots=4`")
    return found


def require_first(names: Sequence[str]) -> None:
    """Refuse to start on another host than the first one, whose line is run here. Raises ExperimentError."""
    here = socket.gethostname()
    if names[0] not in (here, here.partition(".")[0], socket.getfqdn(), "localhost"):
        raise ExperimentError(
            f"--launcher torchrun: this is {here}: start on {names[0]}, the first host of the file"
        )


def line_of(
    number: int, names: Sequence[str], run: Sequence[str], side: Side, folder: Path, *, on_host: int
) -> list[str]:
    """The command of one host.

    Args:
        number: of the host.
        names: of all, the coordinator's first.
        run: `PYTHON -m SIDE RUN_DIR`, as it is run on one host.
        side: which.
        folder: of the run: each has a port of its own.
        on_host: processes on each host.
    """
    port = FIRST_PORT + zlib.crc32(str(folder.absolute()).encode()) % PORTS
    if not side.one_process_a_device:
        place = ["--coordinator", f"{names[0]}:{port}", "--processes", str(len(names))]
        return [*run, *place, "--process", str(number)]
    python, _, *rest = run
    shape = ["--nnodes", str(len(names)), "--node-rank", str(number), "--nproc-per-node", str(on_host)]
    meet = ["--master-addr", names[0], "--master-port", str(port)]
    return [python, "-m", "torch.distributed.run", *shape, *meet, "-m", *rest]


def line_elsewhere(command: Sequence[str], side: Side, platform: str) -> str:
    """A command as a person types it on another host, with the side's environment before it."""
    environment = {**side.environment, **(side.environment_on_cpu if platform == "cpu" else {})}
    pairs = [f"{key}={value}" for key, value in environment.items()]
    alone = [word for word in command if word != "--exit-with-stdin"]  # nobody holds its standard input
    return shlex.join([*(["env", *pairs] if pairs else []), *alone])


def print_elsewhere(lines: dict[str, str]) -> None:
    """Tell who started the run what to run on the other hosts."""
    for name, line in lines.items():
        print(f"on {name}: {line}", file=sys.stderr, flush=True)
